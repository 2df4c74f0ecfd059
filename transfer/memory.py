"""Where KV bytes lie: a rank's pool on CPU or GPU, or a store's slab, as the transfer thread uses them."""

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

Result = TypeVar("Result", covariant=True)


class Pending(Protocol[Result]):
    """Work that uses a staging buffer and blocks until it is completed."""

    @property
    def completed(self) -> bool: ...

    def result(self) -> Result:
        """Wait for it."""
        ...


class Done(Generic[Result]):
    """Work that is completed."""

    completed = True

    def __init__(self, result: Result) -> None:
        self._result = result

    def result(self) -> Result:
        return self._result


class KvMemory(Protocol):
    """[layers, blocks] pieces of `piece_bytes`, each contiguous. Used by the transfer thread only."""

    layers: int
    blocks: int
    # One block in one layer.
    piece_bytes: int
    is_on_gpu: bool

    def allocate_staging(self, size_bytes: int) -> Any:
        """A uint8 buffer that can be sliced, and that UCX takes (buffer protocol or __cuda_array_interface__)."""
        ...

    def enter_thread(self) -> None:
        """The calling thread is the only one that uses the memory from now on."""
        ...

    def read_staging(self, staging: Any, size_bytes: int) -> memoryview:
        """The first bytes of a staging buffer, for the host to read at once: what was gathered or received there."""
        ...

    def prepare(self, key: bytes) -> None:
        """A transfer with this key begins soon: make what its checksums need."""
        ...

    def gather(
        self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Any, key: bytes
    ) -> Pending[bytes]:
        """Copy the pieces, layer-major, to the start of `staging`. The result is their checksum (`transfer.checksum`).

        It copies what was computed before this call.
        """
        ...

    def land(
        self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Any, key: bytes, checksum: bytes
    ) -> Pending[bool]:
        """Copy the pieces from the start of `staging` to the blocks, if this is their checksum; result: whether it is.

        If it is not, nothing is written. Work that begins after completion sees the pieces.
        """
        ...


def staged_pieces(memory: KvMemory, staging: Any, size_bytes: int) -> list[memoryview]:
    """The pieces that lie at the start of a staging buffer, in order."""
    staged, piece_bytes = memory.read_staging(staging, size_bytes), memory.piece_bytes
    return [staged[start : start + piece_bytes] for start in range(0, size_bytes, piece_bytes)]
