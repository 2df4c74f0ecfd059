"""A store's memory, mapped by a worker of its host: blocks are copied from there to the worker's own, once."""

from collections.abc import Sequence

from transfer.incoming import Incoming
from transfer.landing import WRONG_SIZE
from transfer.memory import Done, KvMemory, Pending
from transfer.segments import Tile
from transfer.shared_memory import map_memory
from transfer.ticket import SlabHandle

# What `Announcement.transport` and the counters of bytes call it.
MAPPED = "mapped"


class MappedSlab:
    """The store may give a block away when its lease has ended, while this worker still copies. So the store confirms
    afterwards that the lease had not ended, or MACs of what was copied are checked, and not of what is to be copied.
    """

    def __init__(self, handle: SlabHandle, memory: KvMemory) -> None:
        """memory: the worker's own. Raises OSError if this process cannot map the slab, or the memory's device cannot
        read it.
        """
        if handle.piece_bytes != memory.piece_bytes:
            raise OSError("its blocks have another size")
        self._handle = handle
        # CUDA page-locks no memory that is mapped to be read alone.
        mapped = map_memory(handle.memory, writable=memory.is_on_gpu)
        self._source = memory.host_source(mapped.reshape(handle.blocks, handle.layers, handle.piece_bytes))

    def take(self, incoming: Incoming, index: int) -> Pending[str | None]:
        """See `transfer.incoming.Source`."""
        tile, sources = incoming.tiles[index], incoming.sources(index)
        if not self._has(tile, sources):
            return Done(WRONG_SIZE)
        blocks = incoming.blocks[tile.first_block : tile.first_block + tile.block_count]
        check = None if incoming.mac_sink is None else incoming.mac_sink.check(tile, incoming.macs(index))
        if isinstance(check, str):
            return Done(check)
        return self._source.copy(tile, sources, blocks, check)

    def _has(self, tile: Tile, sources: Sequence[int]) -> bool:
        """Whether the slab has the tile's layers of as many blocks as it has, at these places."""
        return (
            len(sources) == tile.block_count
            and tile.first_layer + tile.layer_count <= self._handle.layers
            and all(0 <= source < self._handle.blocks for source in sources)
        )
