"""KV in host memory: a rank's pool on CPU, or the store's slab."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from mesh.memory.huge_pages import huge_memory
from transfer.checksum import Bytes, same, segment_checksum
from transfer.gmac import tags
from transfer.memory import Check, Done, KeyedPieces, Pool, tags_in
from transfer.segments import Tile

Rows = np.ndarray[tuple[int, int], np.dtype[np.uint8]]


class HostMemory:
    """A `KvMemory` over uint8 arrays viewed as [layers, blocks, bytes], its planes: a piece is a row of the first, then
    that of the next one.

    The underlying memory is dense, in either order: layer-major for a rank's pools, block-major (a transposed view) for
    the store's slab. The part of a segment in a plane is copied by a single call that releases the interpreter lock.
    """

    is_on_gpu = False

    def __init__(self, *planes: Pool) -> None:
        array = planes[0]
        assert all(plane.dtype == np.uint8 and plane.ndim == 3 for plane in planes), (
            "expected uint8 [layers, blocks, bytes]"
        )
        assert all(plane.shape[:2] == array.shape[:2] for plane in planes), "planes hold the same blocks"
        self.layers, self.blocks = array.shape[:2]
        self.piece_bytes = sum(plane.shape[2] for plane in planes)
        self._planes = planes
        # Every piece is a row of one matrix in each plane.
        self._rows: list[Rows] = [_dense(plane).reshape(-1, plane.shape[2]) for plane in planes]
        self._layer_step = array.strides[0] // array.shape[2]
        self._block_step = array.strides[1] // array.shape[2]

    def allocate_staging(self, size_bytes: int) -> Bytes:
        # In small pages pushes take half as long again.
        return np.frombuffer(huge_memory(size_bytes), np.uint8)

    def enter_thread(self) -> None:
        """Nothing depends on the thread here."""

    def host_side(self, staging: Bytes) -> Bytes:
        return staging

    def received(self, staging: Bytes, size_bytes: int) -> None:
        """They are where they were received."""

    def tags(self, staging: Bytes, tile: Tile, keyed: Sequence[KeyedPieces]) -> list[bytes]:
        pieces = staging[: tile.pieces * self.piece_bytes].reshape(tile.pieces, self.piece_bytes)
        return tags_in([piece.data for piece in pieces], tile, keyed)

    def host_source(self, mapped: Pool) -> "_MappedBlocks":
        return _MappedBlocks(self, mapped)

    def prepare(self, key: bytes) -> None:
        """Nothing needs preparation here."""

    def gather(
        self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Bytes, key: bytes
    ) -> Done[bytes]:
        rows = self._rows_of(first_layer, layer_count, blocks)
        size_bytes = len(rows) * self.piece_bytes
        packed = staging[:size_bytes].reshape(len(rows), self.piece_bytes)
        for plane, columns in self._parts():
            # The rows are within bounds. The mode is "clip" because only then does numpy write directly into `out`.
            np.take(plane, rows, axis=0, out=packed[:, columns], mode="clip")
        return Done(segment_checksum(staging, size_bytes, key))

    def land(
        self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Bytes, key: bytes, checksum: bytes
    ) -> Done[bool]:
        rows = self._rows_of(first_layer, layer_count, blocks)
        size_bytes = len(rows) * self.piece_bytes
        right = same(segment_checksum(staging, size_bytes, key), checksum)
        if right:
            packed = staging[:size_bytes].reshape(len(rows), self.piece_bytes)
            for plane, columns in self._parts():
                plane[rows] = packed[:, columns]
        return Done(right)

    def copy(self, tile: Tile, block: int, source: "HostMemory", source_block: int) -> None:
        """Copy the tile's layers of a block of another memory to this block.

        One call copies all layers of a block in a plane and releases the interpreter lock meanwhile.
        """
        found = source.pieces(tile, source_block)
        for place, columns in self._places(tile, block):
            place[:] = found[:, columns]

    def pieces(self, tile: Tile, block: int) -> Rows:
        """The block in the tile's layers, [layer_count, piece_bytes]: where it lies, or a copy of all its planes."""
        places = [place for place, _ in self._places(tile, block)]
        return places[0] if len(places) == 1 else np.concatenate(places, axis=1)

    def _places(self, tile: Tile, block: int) -> Iterator[tuple[Rows, slice]]:
        """By plane, the block in the tile's layers where it lies, and which part of a piece that is."""
        first, end = tile.first_layer, tile.first_layer + tile.layer_count
        assert first >= 0 and end <= self.layers and 0 <= block < self.blocks, "a piece outside the memory"
        return (
            (plane[first:end, block], columns) for plane, (_, columns) in zip(self._planes, self._parts(), strict=True)
        )

    def _parts(self) -> Iterator[tuple[Rows, slice]]:
        """Each plane's rows, and where they lie in a piece."""
        stops = accumulate(plane.shape[1] for plane in self._rows)
        return ((plane, slice(stop - plane.shape[1], stop)) for plane, stop in zip(self._rows, stops, strict=True))

    def _rows_of(
        self, first_layer: int, layer_count: int, blocks: Sequence[int]
    ) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        """Row numbers of the pieces, layer-major."""
        assert first_layer >= 0 and first_layer + layer_count <= self.layers, "a layer outside the memory"
        assert not blocks or 0 <= min(blocks) <= max(blocks) < self.blocks, "a block outside the memory"
        layers = np.arange(first_layer, first_layer + layer_count, dtype=np.intp) * self._layer_step
        return (layers[:, None] + np.array(blocks, np.intp) * self._block_step).reshape(-1)


class _MappedBlocks:
    """A `transfer.memory.HostSource`: a block is copied once, to its place."""

    def __init__(self, memory: HostMemory, mapped: Pool) -> None:
        self._memory = memory
        self._mapped = HostMemory(mapped.transpose(1, 0, 2))

    def copy(
        self, tile: Tile, sources: Sequence[int], blocks: Sequence[int], check: Check | None = None
    ) -> Done[str | None]:
        keyed, made = deque(check.keyed if check else ()), list[bytes]()
        for number, (source, block) in enumerate(zip(sources, blocks, strict=True)):
            self._memory.copy(tile, block, self._mapped, source)
            # While the processor has it in its caches.
            while keyed and keyed[0].block == number:
                made.append(self._tags(keyed.popleft(), block))
        return Done(check.refusal(made) if check else None)

    def _tags(self, keyed: KeyedPieces, block: int) -> bytes:
        pieces = self._memory.pieces(Tile(keyed.first_layer, keyed.layers, 0, 1), block)
        return tags(keyed.key, keyed.first_layer, [piece.data for piece in pieces])


def _dense(plane: Pool) -> Pool:
    block_major = plane.transpose(1, 0, 2)
    assert plane.flags.c_contiguous or block_major.flags.c_contiguous, "expected dense memory"
    return plane if plane.flags.c_contiguous else block_major
