"""Blocks in and out of staging, and their hashes; Triton's kernels in the interpreter where there is no GPU."""

from types import ModuleType

import pytest
import torch
import xxhash

from kernels.kv_copy import BLOCK_TOKENS, reference, triton
from kernels.kv_copy.hashes import ChunkHashes, HashSeed
from kernels.kv_copy.xxh3 import CHUNK_BYTES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_pool() -> torch.Tensor:
    return torch.randint(256, (3, 5, BLOCK_TOKENS, 36), dtype=torch.uint8, device=DEVICE)


def random_bytes(size: int) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize("backend", [reference, triton])
@pytest.mark.parametrize(("first_layer", "layers", "blocks"), [(0, 3, [4, 0, 2]), (1, 1, [3]), (2, 0, [1]), (0, 3, [])])
def test_scattered_blocks_lie_layer_by_layer_in_staging(
    backend: ModuleType, first_layer: int, layers: int, blocks: list[int]
) -> None:
    pool, ids = random_pool(), torch.tensor(blocks, dtype=torch.int32, device=DEVICE)
    piece = BLOCK_TOKENS * 36
    staging = random_bytes(layers * len(blocks) * piece + 64)
    behind = staging[-64:].clone()
    backend.gather_blocks(pool, first_layer, layers, ids, staging)
    expected = [pool[first_layer + layer, block].flatten() for layer in range(layers) for block in blocks]
    assert torch.equal(staging[:-64], torch.cat([*expected, staging[:0]])) and torch.equal(staging[-64:], behind)


@pytest.mark.parametrize("backend", [reference, triton])
def test_what_was_gathered_is_scattered_to_its_blocks_only(backend: ModuleType) -> None:
    pool, target = random_pool(), random_pool()
    before, staging = target.clone(), random_bytes(2 * 2 * BLOCK_TOKENS * 36)
    ids = torch.tensor([3, 1], dtype=torch.int32, device=DEVICE)
    backend.gather_blocks(pool, 1, 2, ids, staging)
    backend.scatter_blocks(staging, target, 1, 2, ids)
    before[1:3, [3, 1]] = pool[1:3, [3, 1]]
    assert torch.equal(target, before)


def expected_hashes(data: torch.Tensor, seed: int) -> bytes:
    whole = data.cpu().numpy().tobytes()
    chunks = [whole[start : start + CHUNK_BYTES] for start in range(0, len(whole), CHUNK_BYTES)]
    return b"".join(xxhash.xxh3_64_intdigest(chunk, seed).to_bytes(8, "little") for chunk in chunks)


SIZES = [241, 1023, 1024, 1025, 5000, CHUNK_BYTES, 2 * CHUNK_BYTES + 2304]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [0, 0xFEDCBA9876543210])
def test_kernels_hash_as_the_library_does(size: int, seed: int) -> None:
    data = random_bytes(size)
    hashes = triton.launch_hashes(data, triton.seeded_table(seed, DEVICE))
    assert hashes.cpu().numpy().tobytes() == expected_hashes(data, seed)


@pytest.mark.parametrize("size", [0, 1, 240, *SIZES, CHUNK_BYTES + 5])
def test_every_size_has_its_hashes(size: int) -> None:
    data = random_bytes(size)
    hashes = ChunkHashes(data, HashSeed(77, DEVICE))
    assert hashes.read() == expected_hashes(data, 77)
    assert hashes.completed
