"""Where KV bytes lie, as the transfer thread sees them: a rank's pool on CPU or GPU, or the store's slab."""

from collections.abc import Sequence
from typing import Any, Protocol


class KvMemory(Protocol):
    """[layers, blocks] pieces of `piece_bytes`, each contiguous. Used by the transfer thread only."""

    layers: int
    blocks: int
    # One block in one layer.
    piece_bytes: int

    def allocate_staging(self, size_bytes: int) -> Any:
        """A uint8 buffer that can be sliced, and that UCX takes (buffer protocol or __cuda_array_interface__)."""
        ...

    def gather(self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Any, key: bytes) -> bytes:
        """Copy the pieces, layer-major, to the start of `staging`; returns their digest (`transfer.digest`)."""
        ...

    def digest(self, staging: Any, size_bytes: int, key: bytes) -> bytes:
        """Of the first `size_bytes` of a staging buffer."""
        ...

    def scatter(self, staging: Any, first_layer: int, layer_count: int, blocks: Sequence[int]) -> None:
        """Copy pieces from the start of `staging` to the blocks."""
        ...
