"""Blocks in the order in which they were released: what a pool evicts first."""

from array import array


class ReleaseOrder:
    """A queue of blocks, each in it once at most, from which any can be taken; 8 bytes for each of `blocks`."""

    def __init__(self, blocks: int) -> None:
        # A ring of links. The index behind the last block stands for both of the queue's ends.
        self._end = blocks
        self._earlier = array("i", [blocks]) * (blocks + 1)
        self._later = array("i", [blocks]) * (blocks + 1)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, block: int) -> None:
        """Put the block behind all others."""
        end = self._end
        last = self._earlier[end]
        self._earlier[block], self._later[block] = last, end
        self._later[last] = self._earlier[end] = block
        self._count += 1

    def take(self, block: int) -> None:
        """Remove a block that is in the queue."""
        earlier, later = self._earlier[block], self._later[block]
        self._later[earlier], self._earlier[later] = later, earlier
        self._count -= 1

    def take_first(self) -> int:
        """Remove and return the block that was added before all others."""
        block = self._later[self._end]
        assert block != self._end
        self.take(block)
        return block
