"""Which workers hold which blocks: one walk along a chain finds how much of it each worker has."""

from collections.abc import Iterable, Sequence


class PrefixIndex:
    """Maps each block to its holders, as the bits of one integer: bit n is the worker that the owner numbered n."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}

    def add(self, worker: int, block_hash: bytes) -> None:
        self._holders[block_hash] = self._holders.get(block_hash, 0) | 1 << worker

    def remove(self, worker: int, block_hashes: Iterable[bytes]) -> None:
        """The worker no longer holds these blocks; blocks that are not in the index are ignored."""
        for block_hash in block_hashes:
            rest = self._holders.get(block_hash, 0) & ~(1 << worker)
            if rest:
                self._holders[block_hash] = rest
            else:
                self._holders.pop(block_hash, None)

    def prefixes(self, chain: Sequence[bytes], workers: Iterable[int]) -> dict[int, int]:
        """How many leading blocks of the chain each of these workers holds.

        Linear in the chain plus the workers: the walk goes on with those that held every block so far.
        """
        lengths: dict[int, int] = {}
        remaining = 0
        for worker in workers:
            lengths[worker] = 0
            remaining |= 1 << worker
        for position, block_hash in enumerate(chain):
            holders = remaining & self._holders.get(block_hash, 0)
            if holders != remaining:
                _note(lengths, remaining & ~holders, position)
                remaining = holders
            if not remaining:
                break
        _note(lengths, remaining, len(chain))
        return lengths

    def longest(self, chain: Sequence[bytes], workers: int, count: int) -> list[int]:
        """Up to `count` of `workers` (bits) that hold most of the chain; none that holds nothing of it."""
        narrowing: list[int] = []
        for block_hash in chain:
            holders = workers & self._holders.get(block_hash, 0)
            if not holders:
                break
            if holders != workers or not narrowing:
                narrowing.append(holders)
            workers = holders
        found: dict[int, None] = {}
        for holders in reversed(narrowing):
            while holders and len(found) < count:
                lowest = holders & -holders
                found[lowest.bit_length() - 1] = None
                holders ^= lowest
        return list(found)


def _note(lengths: dict[int, int], workers: int, length: int) -> None:
    while workers:
        lowest = workers & -workers
        lengths[lowest.bit_length() - 1] = length
        workers ^= lowest
