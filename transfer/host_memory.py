"""KV in host memory: a rank's pool on CPU, or the store's slab."""

from collections.abc import Iterator, Sequence

import numpy as np

from transfer.digest import Bytes, SegmentHasher, segment_digest

Pool = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]


class HostMemory:
    """A `KvMemory` over a uint8 array viewed as [layers, blocks, piece_bytes].

    Its strides are free as long as a piece is contiguous: layer-major for a rank's pool, block-major (a transposed
    view) for the store's slab.
    """

    def __init__(self, array: Pool) -> None:
        assert array.dtype == np.uint8 and array.ndim == 3, "expected uint8 [layers, blocks, piece_bytes]"
        assert array.strides[2] == 1, "a piece must be contiguous"
        self._array = array
        self.layers, self.blocks, self.piece_bytes = array.shape

    def allocate_staging(self, size_bytes: int) -> Bytes:
        return np.empty(size_bytes, np.uint8)

    def gather(self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Bytes, key: bytes) -> bytes:
        hasher = SegmentHasher(staging, key)
        end = 0
        for piece in self._pieces(first_layer, layer_count, blocks):
            staging[end : end + self.piece_bytes] = piece
            end += self.piece_bytes
            hasher.advance(end)
        return hasher.finish(end)

    def digest(self, staging: Bytes, size_bytes: int, key: bytes) -> bytes:
        return segment_digest(staging, size_bytes, key)

    def scatter(self, staging: Bytes, first_layer: int, layer_count: int, blocks: Sequence[int]) -> None:
        end = 0
        for piece in self._pieces(first_layer, layer_count, blocks):
            piece[:] = staging[end : end + self.piece_bytes]
            end += self.piece_bytes

    def _pieces(self, first_layer: int, layer_count: int, blocks: Sequence[int]) -> Iterator[Bytes]:
        """Views of the pieces, layer-major."""
        for layer in self._array[first_layer : first_layer + layer_count]:
            for block in blocks:
                yield layer[block]
