"""Norms, rotation, the way into the pool, and whole blocks in and out of staging, at DeepSeek-R1's widths."""

from collections.abc import Callable, Iterable
from functools import partial

import torch

from bench.kernels.timing import Case
from kernels.kv_copy import BLOCK_TOKENS
from kernels.kv_copy import triton as kv_copy_triton
from kernels.kv_copy.xxh3 import CHUNK_BYTES, seeded_table
from kernels.kv_write import norm_quantize_and_write
from kernels.mla_prefill import merge_attention
from kernels.norm import add_rms_norm, add_rms_norm_quantized
from kernels.rope import rotate

HIDDEN, QUERY, LATENT, ROPE, HEADS = 7168, 1536, 512, 64, 128
WIDTH = LATENT + ROPE
LAYERS = 61
SEGMENT_BYTES = 64 << 20


def cases() -> Iterable[Case]:
    for tokens in (1, 64, 96, 16384):
        values = tokens * HIDDEN
        yield Case(f"residual and norm, {tokens} tokens", "deepmesh", partial(_norm_call, tokens), 8.0 * values)
        yield Case(f"the same, quantized, {tokens} tokens", "deepmesh", partial(_quantized_call, tokens), 9.0 * values)
        moved = tokens * (2 * (QUERY + WIDTH) + QUERY + 4 * WIDTH)
        yield Case(
            f"into a bf16 pool, {tokens} tokens", "deepmesh", partial(_write_call, tokens, torch.bfloat16), moved
        )
        moved -= tokens * WIDTH
        e4m3 = torch.float8_e4m3fn
        yield Case(f"into an e4m3 pool, {tokens} tokens", "deepmesh", partial(_write_call, tokens, e4m3), moved)
    yield Case("queries rotated, 16384 tokens", "deepmesh", _rotate_call, 4.0 * 16384 * HEADS * ROPE)
    yield Case("two parts of a prefix joined, 4096 tokens", "deepmesh", _merge_call, 6.0 * 4096 * HEADS * 128)
    for name, call in (("gathered", _gather_call), ("scattered", _scatter_call)):
        yield Case(f"64 MiB of blocks {name}", "deepmesh", call, 2.0 * SEGMENT_BYTES)
    for size in (8 << 20, SEGMENT_BYTES):
        yield Case(f"{size >> 20} MiB hashed", "deepmesh", partial(_hash_call, size), float(size))


def _bfloat16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _norm_call(tokens: int) -> Callable[[], object]:
    delta, residual, weight = _bfloat16(tokens, HIDDEN), _bfloat16(tokens, HIDDEN), _bfloat16(HIDDEN)
    return lambda: add_rms_norm(delta, residual, weight, 1e-6)


def _quantized_call(tokens: int) -> Callable[[], object]:
    delta, residual, weight = _bfloat16(tokens, HIDDEN), _bfloat16(tokens, HIDDEN), _bfloat16(HIDDEN)
    return lambda: add_rms_norm_quantized(delta, residual, weight, 1e-6)


def _rotations(tokens: int) -> torch.Tensor:
    return torch.polar(torch.ones(tokens, ROPE // 2, device="cuda"), torch.rand(tokens, ROPE // 2, device="cuda"))


def _write_call(tokens: int, dtype: torch.dtype) -> Callable[[], object]:
    pool = torch.empty(max(tokens // BLOCK_TOKENS, 1) * 2, BLOCK_TOKENS, WIDTH, dtype=dtype, device="cuda")
    slots = torch.randperm(pool.shape[0] * BLOCK_TOKENS, device="cuda")[:tokens]
    arguments = (_bfloat16(tokens, QUERY + WIDTH), _bfloat16(QUERY), _bfloat16(LATENT), 1e-6, _rotations(tokens), slots)
    return lambda: norm_quantize_and_write(*arguments, pool)


def _rotate_call() -> Callable[[], object]:
    query, rotations = _bfloat16(16384, HEADS, 192)[:, :, 128:], _rotations(16384)
    return lambda: rotate(query, rotations, query)


def _merge_call() -> Callable[[], object]:
    out, other = _bfloat16(4096, HEADS, 128), _bfloat16(4096, HEADS, 128)
    sums, other_sums = torch.randn(HEADS, 4096, device="cuda"), torch.randn(HEADS, 4096, device="cuda")
    return lambda: merge_attention(out, sums, other, other_sums)


def _segment() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """A pool twice a segment, staging, the job of copying scattered blocks of all its layers, and its pieces."""
    piece_bytes = BLOCK_TOKENS * WIDTH * 2
    count = SEGMENT_BYTES // piece_bytes // LAYERS
    pool = _bfloat16(LAYERS, 2 * count, BLOCK_TOKENS, WIDTH)
    job = torch.zeros(kv_copy_triton.JOB_BLOCKS + count, dtype=torch.int64, device="cuda")
    job[kv_copy_triton.JOB_BLOCK_COUNT] = count
    job[kv_copy_triton.JOB_PIECES] = LAYERS * count
    job[kv_copy_triton.JOB_BLOCKS :] = torch.randperm(2 * count)[:count]
    return pool, torch.empty(SEGMENT_BYTES, dtype=torch.uint8, device="cuda"), job, LAYERS * count


def _gather_call() -> Callable[[], object]:
    pool, staging, job, pieces = _segment()
    return lambda: kv_copy_triton.launch_copy(pool, staging, job, pieces, gather=True)


def _scatter_call() -> Callable[[], object]:
    pool, staging, job, pieces = _segment()
    return lambda: kv_copy_triton.launch_copy(pool, staging, job, pieces, gather=False)


def _hash_call(size: int) -> Callable[[], object]:
    data = torch.randint(256, (size,), dtype=torch.uint8, device="cuda")
    chunks = -(-size // CHUNK_BYTES)
    job = torch.zeros(kv_copy_triton.JOB_BLOCKS, dtype=torch.int64, device="cuda")
    job[kv_copy_triton.JOB_SIZE] = size
    job[kv_copy_triton.JOB_TABLE :] = torch.from_numpy(seeded_table(77).copy())
    sums = torch.empty(chunks * kv_copy_triton.SUMS_OF_CHUNK, dtype=torch.int64, device="cuda")
    hashes = torch.empty(chunks + kv_copy_triton.REST_WORDS, dtype=torch.int64, device="cuda")
    return lambda: kv_copy_triton.launch_hashes(data, job, sums, hashes)
