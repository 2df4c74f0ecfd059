"""Which workers hold which blocks: one walk along a chain finds how much of it each worker has."""

from collections.abc import Iterable, Iterator, Sequence


class PrefixIndex:
    """Maps each block to its holders, as the bits of one integer: bit n is the worker that the owner numbered n."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        # Each worker's bit: one object for all blocks that it alone holds, which are most of them.
        self._bits: dict[int, int] = {}

    def add(self, worker: int, block_hash: bytes) -> None:
        bit = self._bits.get(worker) or self._bits.setdefault(worker, 1 << worker)
        holding = self._holders.get(block_hash)
        self._holders[block_hash] = bit if holding is None else holding | bit

    def remove(self, worker: int, block_hashes: Iterable[bytes]) -> None:
        """The worker no longer holds these blocks; blocks that are not in the index are ignored."""
        for block_hash in block_hashes:
            rest = self._holders.get(block_hash, 0) & ~(1 << worker)
            if rest:
                self._holders[block_hash] = rest
            else:
                self._holders.pop(block_hash, None)

    def holders(self, chain: Sequence[bytes]) -> "Holders":
        """Who holds which part of the chain: the walk goes on with those that held every block so far."""
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
        # The first are all workers, who hold no block at least.
        return Holders(narrowing[1:])


class Holders:
    """Who held how many leading blocks of one chain when the index was asked."""

    def __init__(self, narrowing: Sequence[tuple[int, int]]) -> None:
        """narrowing: ascending numbers of blocks, and the workers that hold at least as many, as bits."""
        self._widening = narrowing[::-1]
        # Those that hold anything, as bits.
        self.anything = narrowing[0][1] if narrowing else 0

    def prefix(self, worker: int) -> int:
        """How many leading blocks this worker holds."""
        for blocks, holding in self._widening:
            if holding >> worker & 1:
                return blocks
        return 0

    def groups(self, workers: int) -> Iterator[int]:
        """Those of `workers` (bits) that hold anything, by how much they hold, those that hold most first."""
        for _, holding in self._widening:
            found = workers & holding
            if found:
                workers ^= found
                yield found


# The holders of a chain of which nobody has anything.
NOTHING_HELD = Holders(())


def numbers(workers: int) -> Iterator[int]:
    """The numbers of the bits that are set, ascending."""
    while workers:
        lowest = workers & -workers
        yield lowest.bit_length() - 1
        workers ^= lowest
