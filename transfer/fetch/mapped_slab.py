"""A store's memory, mapped by a worker of its host: blocks are copied from there to the worker's own, once."""

from collections.abc import Sequence

from transfer.checksum import HASH_BYTES, piece_checksums, same
from transfer.host_memory import HostMemory, Rows
from transfer.incoming import Incoming
from transfer.landing import WRONG_CHECKSUM, WRONG_SIZE
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
    """The store may give a block away when its lease has ended, while this worker still copies. So what was copied is
    verified, and not what is to be copied.
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
            pieces = self._memory.copy(one, incoming.blocks[one.first_block], self._slab, source)
            # While the processor has them in its caches.
            refusal = self._refusal(incoming, index, number, one, pieces)
            if refusal is not None:
                return refusal
        return None

    def _refusal(self, incoming: Incoming, index: int, number: int, one: Tile, pieces: Rows) -> str | None:
        if incoming.mac_sink is not None:
            # A MAC says more than a checksum.
            macs = incoming.macs(index)[number : number + 1]
            return incoming.mac_sink.refusal(one, macs, lambda: [piece.data for piece in pieces])
        announced = incoming.checksum(index)[number * one.pieces * HASH_BYTES :][: one.pieces * HASH_BYTES]
        return None if same(piece_checksums(pieces, incoming.secret), announced) else WRONG_CHECKSUM
