"""The memory that holds KV, as the transfer thread uses it: a rank's pool on CPU or GPU, or a store's slab."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from transfer.segments import Tile

# KV as uint8 [layers, blocks, bytes of a block in a layer].
Pool: TypeAlias = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]
# Takes the number of a block among those that are copied, and its pieces, which no process changes any more. Returns
# why they must not be used, or None.
Check: TypeAlias = Callable[[int, Callable[[], Sequence[memoryview]]], str | None]
Result = TypeVar("Result", covariant=True)


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

        Otherwise it is what `check` returned of a block, or `landing.NOT_COPIED`. `blocks` then hold anything, and
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

    def read_staging(self, staging: Any, size_bytes: int) -> memoryview:
        """The first bytes of a host side: what was gathered or received there."""
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


def staged_pieces(memory: KvMemory, staging: Any, size_bytes: int) -> list[memoryview]:
    """The pieces at the start of a staging buffer's host side, in order."""
    staged, piece_bytes = memory.read_staging(staging, size_bytes), memory.piece_bytes
    return [staged[start : start + piece_bytes] for start in range(0, size_bytes, piece_bytes)]
