"""Copies of blocks to and from staging, and their hashes; without a GPU, kernels run in Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch
import xxhash

from kernels.kv_copy import BLOCK_TOKENS, reference
from kernels.kv_copy.segment import SegmentBuffer
from kernels.kv_copy.xxh3 import CHUNK_BYTES, seeded_table

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PIECE = BLOCK_TOKENS * 36
# Bytes of five blocks of one layer: more than two chunks of a hash.
WIDE_BYTES = 5 * BLOCK_TOKENS * 420
SEED = 0xFEDCBA9876543210


def random_pool() -> torch.Tensor:
    return torch.randint(256, (3, 5, BLOCK_TOKENS, 36), dtype=torch.uint8, device=DEVICE)


def random_bytes(size: int) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, device=DEVICE)


@pytest.fixture(autouse=True)
def _own_stream() -> Iterator[None]:
    """Use a stream of its own: launches cannot be captured on the default one."""
    if DEVICE.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
    else:
        yield


def settle() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def expected_hashes(data: torch.Tensor, seed: int) -> bytes:
    whole = data.cpu().numpy().tobytes()
    chunks = [whole[start : start + CHUNK_BYTES] for start in range(0, len(whole), CHUNK_BYTES)]
    return b"".join(xxhash.xxh3_64_intdigest(chunk, seed).to_bytes(8, "little") for chunk in chunks)


@pytest.mark.parametrize(("first_layer", "layers", "blocks"), [(0, 3, [4, 0, 2]), (1, 1, [3]), (2, 0, [1]), (0, 3, [])])
def test_gathered_blocks_lie_by_layer_and_are_hashed(first_layer: int, layers: int, blocks: list[int]) -> None:
    pool, staging = random_pool(), random_bytes(9 * PIECE + 64)
    before, size = staging.clone(), layers * len(blocks) * PIECE
    segment = SegmentBuffer([pool], staging)
    segment.gather(first_layer, layers, blocks, seeded_table(SEED))
    settle()
    expected = torch.zeros_like(staging)
    ids = torch.tensor(blocks, dtype=torch.int32, device=DEVICE)
    reference.gather_blocks(pool, first_layer, layers, ids, expected)
    assert torch.equal(staging[:size], expected[:size]) and torch.equal(staging[size:], before[size:])
    assert segment.hashes() == expected_hashes(staging[:size], SEED)


def test_what_was_gathered_lands_in_its_blocks_only() -> None:
    pool, target = random_pool(), random_pool()
    expected, staging = target.clone(), random_bytes(2 * 2 * PIECE)
    sender, receiver, table = SegmentBuffer([pool], staging), SegmentBuffer([target], staging), seeded_table(SEED)
    sender.gather(1, 2, [3, 1], table)
    settle()
    receiver.land(1, 2, [4, 0], table, sender.hashes())
    settle()
    reference.scatter_blocks(staging, expected, 1, 2, torch.tensor([4, 0], dtype=torch.int32, device=DEVICE))
    assert receiver.landed() and torch.equal(target, expected)
    assert torch.equal(target[1:, [4, 0]], pool[1:, [3, 1]])


@pytest.mark.parametrize("byte", [0, CHUNK_BYTES - 1, CHUNK_BYTES, WIDE_BYTES - 1])
def test_a_segment_with_a_wrong_byte_does_not_land(byte: int) -> None:
    target = random_bytes(WIDE_BYTES).view(1, 5, BLOCK_TOKENS, -1)
    before, staging, table = target.clone(), random_bytes(WIDE_BYTES), seeded_table(SEED)
    segment, hashes = SegmentBuffer([target], staging), expected_hashes(staging, SEED)
    staging[byte] ^= 1
    segment.land(0, 1, [4, 0, 1, 2, 3], table, hashes)
    settle()
    assert not segment.landed() and torch.equal(target, before)
    staging[byte] ^= 1
    segment.land(0, 1, [4, 0, 1, 2, 3], table, hashes)
    settle()
    assert segment.landed() and torch.equal(target[:, [4, 0, 1, 2, 3]].flatten(), staging)


def test_one_buffer_serves_segment_after_segment() -> None:
    pool, staging = random_pool(), random_bytes(9 * PIECE)
    segment, table = SegmentBuffer([pool], staging), seeded_table(SEED)
    for layers, blocks in ((3, [0, 1, 2]), (1, [4]), (2, [3, 0])):
        segment.gather(0, layers, blocks, table)
        settle()
        pieces = pool[:layers, blocks].flatten()
        assert torch.equal(staging[: pieces.numel()], pieces)
        assert segment.hashes() == expected_hashes(pieces, SEED)


@pytest.mark.parametrize(
    "size", [0, 256, 768, 1024, 1280, 5120, CHUNK_BYTES, CHUNK_BYTES + 256, 2 * CHUNK_BYTES + 2304]
)
@pytest.mark.parametrize("seed", [0, SEED])
def test_every_size_has_the_librarys_hashes(size: int, seed: int) -> None:
    pool = random_bytes(max(size, 256)).view(1, -1, BLOCK_TOKENS, 4)
    segment = SegmentBuffer([pool], random_bytes(size + 256))
    segment.gather(0, 1, range(size // 256), seeded_table(seed))
    settle()
    assert segment.hashes() == expected_hashes(pool.flatten()[:size], seed)


def test_a_block_of_two_planes_is_one_piece() -> None:
    planes, targets = (
        [random_pool(), random_bytes(3 * 5 * BLOCK_TOKENS * 12).view(3, 5, BLOCK_TOKENS, 12)] for _ in "ab"
    )
    staging, table = random_bytes(2 * 3 * BLOCK_TOKENS * 48), seeded_table(SEED)
    sender, receiver = SegmentBuffer(planes, staging), SegmentBuffer(targets, staging)
    before = [target.clone() for target in targets]
    sender.gather(1, 2, [3, 1, 0], table)
    settle()
    pieces = torch.cat([plane[1:, [3, 1, 0]].flatten(2) for plane in planes], dim=2)
    assert torch.equal(staging, pieces.flatten()) and sender.hashes() == expected_hashes(staging, SEED)
    receiver.land(1, 2, [4, 0, 2], table, sender.hashes())
    settle()
    assert receiver.landed()
    for plane, target, expected in zip(planes, targets, before, strict=True):
        expected[1:, [4, 0, 2]] = plane[1:, [3, 1, 0]]
        assert torch.equal(target, expected)
