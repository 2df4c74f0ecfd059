"""A store's memory, mapped by a worker of its host: its blocks are copied from there to staging slots."""

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
    """For workers whose blocks are not in plain host memory: `mapped_slab` has the way of those whose are, and how they
    know that what they copied is right.
    """

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
        """Begin to copy an announced segment, which the slab has, to `staging`, block by block."""
        return self._source.stage(list(self._runs(incoming.tiles[index], incoming.sources(index))), staging)

    def _runs(self, tile: Tile, sources: Sequence[int]) -> Iterator[Run]:
        """Blocks that are neighbours in the slab are one run."""
        piece_bytes = self._handle.piece_bytes
        block_bytes, size = self._handle.layers * piece_bytes, tile.layer_count * piece_bytes
        run = Run(sources[0] * block_bytes + tile.first_layer * piece_bytes, 0, 0)
        for source in sources:
            start = source * block_bytes + tile.first_layer * piece_bytes
            if start != run.start + run.size_bytes:
                yield run
                run = Run(start, run.place + run.size_bytes, 0)
            run = run._replace(size_bytes=run.size_bytes + size)
        yield run
