import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from transfer.checksum import CHUNK_BYTES, checksum_bytes, seed_of, segment_checksum
from transfer.host_memory import HostMemory
from transfer.memory import Check, KeyedPieces, tags_in
from transfer.segments import Tile

LAYERS, BLOCKS = 3, 8


def memory_of(order: str, piece_bytes: int = 40) -> tuple[HostMemory, np.ndarray]:
    shape = (LAYERS, BLOCKS, piece_bytes) if order == "layer-major" else (BLOCKS, LAYERS, piece_bytes)
    dense = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    array = dense if order == "layer-major" else dense.transpose(1, 0, 2)
    return HostMemory(array), array


tiles = st.tuples(st.integers(0, 2), st.integers(1, 3)).filter(lambda tile: sum(tile) <= LAYERS)
orders = st.sampled_from(["layer-major", "block-major"])


@given(orders, tiles, st.permutations(range(BLOCKS)), st.integers(0, BLOCKS))
def test_pieces_are_gathered_layer_by_layer_with_their_checksum(
    order: str, tile: tuple[int, int], blocks: list[int], count: int
) -> None:
    memory, array = memory_of(order)
    first, layers = tile
    staging = memory.allocate_staging(LAYERS * BLOCKS * 40)
    checksum = memory.gather(first, layers, blocks[:count], staging, b"key")
    wanted = array[first : first + layers][:, blocks[:count]].reshape(-1)
    assert (staging[: wanted.size] == wanted).all()
    assert checksum.result() == segment_checksum(wanted, wanted.size, b"key")


@given(orders, tiles, st.permutations(range(BLOCKS)), st.integers(0, BLOCKS))
def test_what_was_gathered_lands_in_the_named_pieces_alone(
    order: str, tile: tuple[int, int], blocks: list[int], count: int
) -> None:
    memory, array = memory_of(order)
    first, layers = tile
    before = array.copy()
    values = np.random.default_rng(1).integers(0, 256, (layers, count, 40), np.uint8)
    staged = values.reshape(-1)
    checksum = segment_checksum(staged, staged.size, b"key")
    assert memory.land(first, layers, blocks[:count], staged, b"key", checksum).result()
    before[first : first + layers, blocks[:count]] = values
    assert (array == before).all()


@given(orders, tiles, st.permutations(range(BLOCKS)), st.integers(1, BLOCKS), st.data())
def test_what_is_not_as_its_checksum_says_is_written_nowhere(
    order: str, tile: tuple[int, int], blocks: list[int], count: int, data: st.DataObject
) -> None:
    memory, array = memory_of(order)
    first, layers = tile
    before = array.copy()
    staged = np.random.default_rng(1).integers(0, 256, layers * count * 40, np.uint8)
    checksum = segment_checksum(staged, staged.size, b"key")
    staged[data.draw(st.integers(0, staged.size - 1))] ^= 1
    assert not memory.land(first, layers, blocks[:count], staged, b"key", checksum).result()
    assert (array == before).all()


def test_a_checksum_is_of_the_chunks_hashes_and_keyed() -> None:
    data = np.random.default_rng(0).integers(0, 256, 2 * CHUNK_BYTES + 5, np.uint8)
    seed = seed_of(b"key")
    parts = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
    hashes = b"".join(xxhash.xxh3_64_intdigest(part.tobytes(), seed).to_bytes(8, "little") for part in parts)
    assert segment_checksum(data, len(data), b"key") == hashes
    assert len(hashes) == checksum_bytes(len(data))
    assert segment_checksum(data, len(data), b"other") != segment_checksum(data, len(data), b"key")


@pytest.mark.parametrize("block", [-1, BLOCKS])
def test_a_block_outside_the_memory_is_our_own_bug(block: int) -> None:
    memory, _ = memory_of("block-major")
    with pytest.raises(AssertionError):
        memory.gather(0, LAYERS, [block], memory.allocate_staging(1000), b"")


def test_a_piece_is_what_all_planes_hold_of_it() -> None:
    planes = [np.random.default_rng(0).integers(0, 256, (LAYERS, BLOCKS, size), np.uint8) for size in (40, 12)]
    others = [np.zeros_like(plane) for plane in planes]
    sender, receiver = HostMemory(*planes), HostMemory(*others)
    assert sender.piece_bytes == 52
    staging = sender.allocate_staging(2 * 3 * 52)
    checksum = sender.gather(1, 2, [4, 0, 6], staging, b"key").result()
    pieces = np.concatenate([plane[1:3][:, [4, 0, 6]] for plane in planes], axis=2)
    assert (staging == pieces.reshape(-1)).all()
    assert receiver.land(1, 2, [2, 3, 1], staging, b"key", checksum).result()
    for plane, other in zip(planes, others, strict=True):
        assert (other[1:3][:, [2, 3, 1]] == plane[1:3][:, [4, 0, 6]]).all() and other.any(axis=2).sum() == 6


def test_mapped_blocks_are_copied_to_both_planes() -> None:
    others = [np.zeros((LAYERS, BLOCKS, size), np.uint8) for size in (40, 12)]
    mapped = np.random.default_rng(0).integers(1, 256, (7, LAYERS + 1, 52), np.uint8)
    tile, sources = Tile(1, 2, 0, 3), [4, 0, 6]
    keyed = [KeyedPieces(block, 1, 2, bytes([block]) * 32) for block in range(3)]
    # A layer by itself has another key.
    keyed[2:] = [KeyedPieces(2, 1, 1, bytes(32)), KeyedPieces(2, 2, 1, bytes([9]) * 32)]
    expected = tags_in([mapped[source, layer].data for layer in (1, 2) for source in sources], tile, keyed)
    check = Check(keyed, lambda tags: "right" if tags == expected else "wrong")
    copied = HostMemory(*others).host_source(mapped).copy(tile, sources, [2, 3, 1], check)
    assert copied.result() == "right"
    for other, columns in zip(others, (slice(40), slice(40, 52)), strict=True):
        assert (other[1:3][:, [2, 3, 1]] == mapped[[4, 0, 6], 1:3, columns].transpose(1, 0, 2)).all()
        assert other.any(axis=2).sum() == 6
