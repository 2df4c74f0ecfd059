"""A store's memory, mapped by a worker of its host: segments are copied from there to staging slots, as if received."""

from collections.abc import Iterator, Sequence
from typing import Any

from transfer.fetch.mapped_slab import lies_in
from transfer.incoming import Incoming
from transfer.memory import KvMemory, Run
from transfer.segments import Tile
from transfer.shared_memory import map_memory
from transfer.ticket import SlabHandle
from transfer.transport import Transmission


class StagedSlab:
    """For workers whose blocks are not in plain host memory: `mapped_slab` has the way of those whose are."""

    def __init__(self, handle: SlabHandle, memory: KvMemory) -> None:
        """memory: the worker's own. Raises OSError if this process cannot map the slab, or the memory's device cannot
        read it.
        """
        if handle.piece_bytes != memory.piece_bytes:
            raise OSError("its blocks have another size")
        self._handle = handle
        # CUDA page-locks no memory that is mapped to be read alone.
        self._source = memory.host_source(map_memory(handle.memory, writable=memory.is_on_gpu))

    def has(self, incoming: Incoming, index: int) -> bool:
        """Whether an announced segment lies in the slab."""
        return lies_in(self._handle, incoming.tiles[index], incoming.sources(index))

    def stage(self, incoming: Incoming, index: int, staging: Any) -> Transmission:
        """Begin to copy an announced segment, which the slab has, to `staging`."""
        return self._source.stage(list(self._runs(incoming.tiles[index], incoming.sources(index))), staging)

    def _runs(self, tile: Tile, sources: Sequence[int]) -> Iterator[Run]:
        """A segment has the layers of its blocks one after the other, the slab its blocks: of one block that is the
        same.
        """
        layers, piece_bytes = self._handle.layers, self._handle.piece_bytes
        together = tile.layer_count if len(sources) == 1 else 1
        for layer in range(0, tile.layer_count, together):
            for number, source in enumerate(sources):
                start = source * layers + tile.first_layer + layer
                place = layer * len(sources) + number
                yield Run(start * piece_bytes, place * piece_bytes, together * piece_bytes)
