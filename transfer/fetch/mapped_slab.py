"""A store's memory, mapped by a worker of its host: blocks are copied from there to the worker's own, once."""

from collections.abc import Sequence
from functools import partial

from transfer.block_macs import Pieces
from transfer.host_memory import HostMemory
from transfer.incoming import Incoming
from transfer.landing import WRONG_SIZE
from transfer.segments import Tile
from transfer.shared_memory import map_memory
from transfer.ticket import SlabHandle

# What `Announcement.transport` and the counters of bytes call it.
MAPPED = "mapped"


def lies_in(slab: SlabHandle, tile: Tile, sources: Sequence[int]) -> bool:
    """Whether a store's memory has the tile's layers of as many blocks as it has, at these places."""
    return (
        len(sources) == tile.block_count
        and tile.first_layer + tile.layer_count <= slab.layers
        and all(0 <= source < slab.blocks for source in sources)
    )


class MappedSlab:
    """The store may give a block away when its lease has ended, while this worker still copies. So the store confirms
    afterwards that the lease had not ended, or MACs of what was copied are checked, and not of what is to be copied.
    """

    def __init__(self, handle: SlabHandle, memory: HostMemory) -> None:
        """memory: the worker's own. Raises OSError if this process cannot map the slab."""
        if handle.piece_bytes != memory.piece_bytes:
            raise OSError("its blocks have another size")
        self._memory = memory
        self._handle = handle
        array = map_memory(handle.memory).reshape(handle.blocks, handle.layers, handle.piece_bytes)
        self._slab = HostMemory(array.transpose(1, 0, 2))

    def take(self, incoming: Incoming, index: int) -> str | None:
        """Copy an announced segment. Returns why it must not be used; its blocks then hold anything."""
        tile, sources = incoming.tiles[index], incoming.sources(index)
        if not lies_in(self._handle, tile, sources):
            return WRONG_SIZE
        for number, source in enumerate(sources):
            one = tile._replace(first_block=tile.first_block + number, block_count=1)
            block = incoming.blocks[one.first_block]
            self._memory.copy(one, block, self._slab, source)
            if incoming.mac_sink is not None:
                # While the processor has them in its caches.
                macs, pieces = incoming.macs(index)[number : number + 1], partial(self._pieces, one, block)
                refusal = incoming.mac_sink.refusal(one, macs, pieces)
                if refusal is not None:
                    return refusal
        return None

    def _pieces(self, one: Tile, block: int) -> Pieces:
        return [piece.data for piece in self._memory.pieces(one, block)]
