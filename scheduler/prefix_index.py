"""Which workers hold which blocks: one walk along a chain finds how much of it each worker holds."""

from collections.abc import Iterable, Iterator, Sequence


class PrefixIndex:
    """Maps each block to its holders, as one integer: bit n stands for the worker that the owner numbered n."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        # Each worker's bit. Blocks that only one worker holds, which are most, share this one integer object.
        self._bits: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, worker: int, block_hash: bytes) -> None:
        bit = self._bits.get(worker) or self._bits.setdefault(worker, 1 << worker)
        holding = self._holders.get(block_hash)
        self._holders[block_hash] = bit if holding is None else holding | bit

    def remove(self, worker: int, block_hashes: Iterable[bytes]) -> None:
        """Note that the worker no longer holds these blocks; blocks that are not in the index are ignored."""
        for block_hash in block_hashes:
            rest = self._holders.get(block_hash, 0) & ~(1 << worker)
            if rest:
                self._holders[block_hash] = rest
            else:
                self._holders.pop(block_hash, None)

    def holders(self, chain: Sequence[bytes]) -> "Holders":
        """Who holds which part of the chain. The walk continues with the workers that held every block so far."""
        narrowing: list[tuple[int, int]] = []
        known, remaining, blocks = self._holders.get, -1, 0
        for block_hash in chain:
            holding = remaining & known(block_hash, 0)
            if holding != remaining:
                narrowing.append((blocks, remaining))
                remaining = holding
                if not holding:
                    break
            blocks += 1
        if remaining:
            narrowing.append((blocks, remaining))
        # The first entry is dropped: it has all workers, since all hold at least zero blocks.
        return Holders(narrowing[1:])


class Holders:
    """How many leading blocks of one chain each worker held when the index was asked."""

    def __init__(self, narrowing: Sequence[tuple[int, int]]) -> None:
        """narrowing: ascending numbers of blocks, each with a bit mask of the workers that hold at least as many."""
        self._widening = narrowing[::-1]
        # What each holds in its pool or in host memory, if some worker has host memory.
        self.anywhere: Holders | None = None
        # Bit mask of the workers that hold anything.
        self.anything = narrowing[0][1] if narrowing else 0

    def prefix(self, worker: int) -> int:
        """How many leading blocks this worker holds."""
        for blocks, holding in self._widening:
            if holding >> worker & 1:
                return blocks
        return 0

    def hosted(self, worker: int) -> int:
        """How many blocks after its `prefix` this worker holds in host memory."""
        return 0 if self.anywhere is None else max(self.anywhere.prefix(worker) - self.prefix(worker), 0)

    def groups(self, workers: int) -> Iterator[int]:
        """Bit masks of those of `workers` that hold equally much, the groups that hold most first; those with nothing
        are left out.
        """
        for _, holding in self._widening:
            found = workers & holding
            if found:
                workers ^= found
                yield found


def numbers(workers: int) -> Iterator[int]:
    """The numbers of the bits that are set, ascending."""
    while workers:
        lowest = workers & -workers
        yield lowest.bit_length() - 1
        workers ^= lowest
