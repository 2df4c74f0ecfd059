"""The memory that holds KV, as the transfer thread uses it: a rank's pool on CPU or GPU, or a store's slab."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from transfer.gmac import tags
from transfer.segments import Tile

# KV as uint8 [layers, blocks, bytes of a block in a layer].
Pool: TypeAlias = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]
Result = TypeVar("Result", covariant=True)


class KeyedPieces(NamedTuple):
    """Pieces of one block in consecutive layers that have their MACs (`transfer.gmac`) under the same key."""

    # The block's number within a segment.
    block: int
    first_layer: int
    layers: int
    key: bytes


class Check(NamedTuple):
    """What is to be checked of a segment's blocks."""

    # By block, ascending.
    keyed: Sequence[KeyedPieces]
    # Takes the tags of each of these. Returns why the segment must not be used, or None.
    refusal: Callable[[Sequence[bytes]], str | None]


class Pending(Protocol[Result]):
    """Work in progress that uses a staging buffer and blocks."""

    @property
    def completed(self) -> bool: ...

    def result(self) -> Result:
        """Wait until the work has completed; returns its result."""
        ...


class Done(Generic[Result]):
    """Work that has completed."""

    completed = True

    def __init__(self, result: Result) -> None:
        self._result = result

    def result(self) -> Result:
        return self._result


class HostSource(Protocol):
    """Blocks in memory that this process has mapped and another one may write."""

    def copy(
        self, tile: Tile, sources: Sequence[int], blocks: Sequence[int], check: Check | None = None
    ) -> Pending[str | None]:
        """Begin to copy the tile's layers of these blocks to `blocks` of the KV memory, one to one. The result is None
        if that succeeded: work that begins after completion sees them.

        Otherwise it is what `check` says of their tags, or `landing.NOT_COPIED`. `blocks` then hold anything, and
        nothing writes to them any more.
        """
        ...


class KvMemory(Protocol):
    """KV as [layers, blocks] pieces of `piece_bytes`, each contiguous. Used by the transfer thread only."""

    layers: int
    blocks: int
    # Size of one block in one layer.
    piece_bytes: int
    is_on_gpu: bool

    def allocate_staging(self, size_bytes: int) -> Any:
        """A uint8 buffer that can be sliced and passed to UCX (buffer protocol or __cuda_array_interface__)."""
        ...

    def enter_thread(self) -> None:
        """From now on the calling thread is the only one that uses the memory."""
        ...

    def host_side(self, staging: Any) -> Any:
        """The buffer's side in host memory, which `gather`, `land` and UCX take in its place."""
        ...

    def received(self, staging: Any, size_bytes: int) -> None:
        """A peer's bytes lie at the start of a staging buffer: `tags` and `land` read them next."""
        ...

    def tags(self, staging: Any, tile: Tile, keyed: Sequence[KeyedPieces]) -> list[bytes]:
        """The tags of a tile's pieces at the start of a staging buffer, where they were gathered or received."""
        ...

    def host_source(self, mapped: Pool) -> HostSource:
        """Prepare to copy from these blocks, [blocks, layers, piece_bytes]. Raises OSError if that cannot be."""
        ...

    def prepare(self, key: bytes) -> None:
        """A transfer with this key begins soon: prepare what its checksums need."""
        ...

    def gather(
        self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Any, key: bytes
    ) -> Pending[bytes]:
        """Copy the pieces, layer-major, to the start of `staging`. The result is their checksum (`transfer.checksum`).

        The copy includes everything that was computed before this call.
        """
        ...

    def land(
        self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Any, key: bytes, checksum: bytes
    ) -> Pending[bool]:
        """Copy the pieces from the start of `staging` to the blocks if they have this checksum. The result is whether
        they do.

        If they do not, nothing is written. Work that begins after completion sees the pieces.
        """
        ...


def tags_in(pieces: Sequence[memoryview], tile: Tile, keyed: Sequence[KeyedPieces]) -> list[bytes]:
    """pieces: all of the tile's, layer-major."""
    made = []
    for block, first_layer, layers, key in keyed:
        first = first_layer - tile.first_layer
        made.append(tags(key, first_layer, pieces[block :: tile.block_count][first : first + layers]))
    return made
