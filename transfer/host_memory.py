"""KV in host memory: a rank's pool on CPU, or the store's slab."""

from collections.abc import Sequence

import numpy as np

from transfer.checksum import Bytes, piece_checksums, same, segment_checksum
from transfer.memory import Done
from transfer.segments import Tile

Pool = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]
Rows = np.ndarray[tuple[int, int], np.dtype[np.uint8]]


class HostMemory:
    """A `KvMemory` over a uint8 array viewed as [layers, blocks, piece_bytes].

    The underlying memory is dense, in either order: layer-major for a rank's pool, block-major (a transposed view) for
    the store's slab. Each segment is copied by a single call that releases the interpreter lock.
    """

    is_on_gpu = False

    def __init__(self, array: Pool) -> None:
        assert array.dtype == np.uint8 and array.ndim == 3, "expected uint8 [layers, blocks, piece_bytes]"
        self.layers, self.blocks, self.piece_bytes = array.shape
        block_major = array.transpose(1, 0, 2)
        assert array.flags.c_contiguous or block_major.flags.c_contiguous, "expected dense memory"
        dense = array if array.flags.c_contiguous else block_major
        # [blocks, layers, piece_bytes]
        self._block_major: Pool = block_major
        # Every piece is a row of one matrix.
        self._rows: Rows = dense.reshape(-1, self.piece_bytes)
        self._layer_step = array.strides[0] // self.piece_bytes
        self._block_step = array.strides[1] // self.piece_bytes

    def allocate_staging(self, size_bytes: int) -> Bytes:
        return np.zeros(size_bytes, np.uint8)

    def enter_thread(self) -> None:
        """Nothing depends on the thread here."""

    def read_staging(self, staging: Bytes, size_bytes: int) -> memoryview:
        return staging[:size_bytes].data

    def prepare(self, key: bytes) -> None:
        """Nothing needs preparation here."""

    def gather(
        self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Bytes, key: bytes
    ) -> Done[bytes]:
        rows = self._rows_of(first_layer, layer_count, blocks)
        size_bytes = len(rows) * self.piece_bytes
        packed = staging[:size_bytes].reshape(len(rows), self.piece_bytes)
        # The rows are within bounds. The mode is "clip" because only then does numpy write directly into `out`.
        np.take(self._rows, rows, axis=0, out=packed, mode="clip")
        return Done(segment_checksum(staging, size_bytes, key))

    def land(
        self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Bytes, key: bytes, checksum: bytes
    ) -> Done[bool]:
        rows = self._rows_of(first_layer, layer_count, blocks)
        size_bytes = len(rows) * self.piece_bytes
        right = same(segment_checksum(staging, size_bytes, key), checksum)
        if right:
            self._rows[rows] = staging[:size_bytes].reshape(len(rows), self.piece_bytes)
        return Done(right)

    def checksums(self, tile: Tile, blocks: Sequence[int], key: bytes) -> bytes:
        """`piece_checksums` of the tile's layers of these blocks, block by block."""
        return b"".join(piece_checksums(self.pieces(tile, block), key) for block in blocks)

    def copy(self, tile: Tile, block: int, source: "HostMemory", source_block: int) -> Rows:
        """Copy the tile's layers of a block of another memory to this block. Returns its pieces as they lie here then.

        One call copies all layers of a block and releases the interpreter lock meanwhile.
        """
        pieces = self.pieces(tile, block)
        pieces[:] = source.pieces(tile, source_block)
        return pieces

    def pieces(self, tile: Tile, block: int) -> Rows:
        """The block in the tile's layers, [layer_count, piece_bytes], where it lies."""
        first, end = tile.first_layer, tile.first_layer + tile.layer_count
        assert first >= 0 and end <= self.layers and 0 <= block < self.blocks, "a piece outside the memory"
        pieces: Rows = self._block_major[block, first:end]
        return pieces

    def _rows_of(
        self, first_layer: int, layer_count: int, blocks: Sequence[int]
    ) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        """Row numbers of the pieces, layer-major."""
        assert first_layer >= 0 and first_layer + layer_count <= self.layers, "a layer outside the memory"
        assert not blocks or 0 <= min(blocks) <= max(blocks) < self.blocks, "a block outside the memory"
        layers = np.arange(first_layer, first_layer + layer_count, dtype=np.intp) * self._layer_step
        return (layers[:, None] + np.array(blocks, np.intp) * self._block_step).reshape(-1)
