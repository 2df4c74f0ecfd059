"""Where KV bytes lie, as the transfer thread sees them: a rank's pool on CPU or GPU, or the store's slab."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result", covariant=True)


class Pending(Protocol[Result]):
    """Work on a staging buffer, and on blocks. Both are its own until it is completed."""

    @property
    def completed(self) -> bool: ...

    def result(self) -> Result:
        """Waits for it."""
        ...


class Done:
    """Pending work that is over."""

    completed = True

    def __init__(self, digest: bytes = b"") -> None:
        self._digest = digest

    def result(self) -> bytes:
        return self._digest


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

    def gather(
        self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Any, key: bytes
    ) -> Pending[bytes]:
        """Copy the pieces, layer-major, to the start of `staging`. Results in their digest (`transfer.digest`).

        What was computed when it is called is gathered.
        """
        ...

    def digest(self, staging: Any, size_bytes: int, key: bytes) -> Pending[bytes]:
        """Of the first `size_bytes` of a staging buffer."""
        ...

    def scatter(self, staging: Any, first_layer: int, layer_count: int, blocks: Sequence[int]) -> Pending[object]:
        """Copy pieces from the start of `staging` to the blocks. Work begun after it is completed sees them."""
        ...
