"""Where KV bytes lie, as the transfer thread sees them: a rank's pool on CPU or GPU, or the store's slab."""

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

Result = TypeVar("Result", covariant=True)


class Pending(Protocol[Result]):
    """Work on a staging buffer, and on blocks. Both are its own until it is completed."""

    @property
    def completed(self) -> bool: ...

    def result(self) -> Result:
        """Waits for it."""
        ...


class Done(Generic[Result]):
    """Pending work that is over."""

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
        """The calling thread is the one that uses it from now on."""
        ...

    def expect(self, key: bytes) -> None:
        """A transfer with this key begins soon: what its digests need can be made now."""
        ...

    def gather(
        self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Any, key: bytes
    ) -> Pending[bytes]:
        """Copy the pieces, layer-major, to the start of `staging`. Results in their digest (`transfer.digest`).

        What was computed when it is called is gathered.
        """
        ...

    def land(
        self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Any, key: bytes, digest: bytes
    ) -> Pending[bool]:
        """Copy the pieces from the start of `staging` to the blocks, if this is their digest: results in whether it is.

        Where it is not, nothing is written. Work begun after it is completed sees the pieces.
        """
        ...
