"""Norms, rotation, writes to the pool, and copies of whole blocks to and from staging, at DeepSeek-R1's widths."""

from collections.abc import Callable, Iterable
from functools import partial

import torch

from bench.kernels.deepseek_r1 import HEADS, HIDDEN, LATENT, LAYERS, NOPE, QUERY, ROPE, WIDTH
from bench.kernels.inputs import random_bfloat16, random_rotations
from bench.kernels.timing import Case
from kernels.kv_copy import BLOCK_TOKENS
from kernels.kv_copy import triton as kv_copy_triton
from kernels.kv_copy.xxh3 import CHUNK_BYTES, seeded_table
from kernels.kv_write import norm_quantize_and_write
from kernels.norm import add_rms_norm, add_rms_norm_in_both_forms, add_rms_norm_quantized
from kernels.rope import rotate


def cases() -> Iterable[Case]:
    for tokens in (1, 64, 96, 16384):
        values = tokens * HIDDEN
        norm = partial(_norm_call, tokens, add_rms_norm)
        yield Case(f"residual and norm, {tokens} tokens", "deepmesh", norm, 8.0 * values)
        both, quantized = add_rms_norm_in_both_forms, add_rms_norm_quantized
        yield Case(
            f"the same, in FP8 too, {tokens} tokens", "deepmesh", partial(_norm_call, tokens, both), 9.0 * values
        )
        yield Case(f"in FP8 alone, {tokens} tokens", "deepmesh", partial(_norm_call, tokens, quantized), 7.0 * values)
        moved = tokens * (2 * (QUERY + WIDTH) + QUERY + 4 * WIDTH)
        yield Case(
            f"into a bf16 pool, {tokens} tokens", "deepmesh", partial(_write_call, tokens, torch.bfloat16), moved
        )
        moved -= tokens * WIDTH
        e4m3 = torch.float8_e4m3fn
        yield Case(f"into an e4m3 pool, {tokens} tokens", "deepmesh", partial(_write_call, tokens, e4m3), moved)
    yield Case("queries rotated, 16384 tokens", "deepmesh", _rotate_call, 4.0 * 16384 * HEADS * ROPE)
    for size in (8 << 20, 64 << 20):
        yield Case(
            f"{size >> 20} MiB of blocks gathered and hashed", "deepmesh", partial(_gather_call, size), 2.0 * size
        )
        yield Case(f"{size >> 20} MiB compared with their hashes", "deepmesh", partial(_compare_call, size), 1.0 * size)
        yield Case(f"{size >> 20} MiB scattered", "deepmesh", partial(_scatter_call, size), 2.0 * size)


def _norm_call(tokens: int, norm: Callable[..., object]) -> Callable[[], object]:
    delta, residual, weight = random_bfloat16(tokens, HIDDEN), random_bfloat16(tokens, HIDDEN), random_bfloat16(HIDDEN)
    return lambda: norm(delta, residual, weight, 1e-6)


def _write_call(tokens: int, dtype: torch.dtype) -> Callable[[], object]:
    pool = torch.empty(max(tokens // BLOCK_TOKENS, 1) * 2, BLOCK_TOKENS, WIDTH, dtype=dtype, device="cuda")
    slots = torch.randperm(pool.shape[0] * BLOCK_TOKENS, device="cuda")[:tokens]
    arguments = (
        random_bfloat16(tokens, QUERY + WIDTH),
        random_bfloat16(QUERY),
        random_bfloat16(LATENT),
        1e-6,
        random_rotations(tokens, ROPE),
        slots,
    )
    return lambda: norm_quantize_and_write(*arguments, pool)


def _rotate_call() -> Callable[[], object]:
    query, rotations = random_bfloat16(16384, HEADS, NOPE + ROPE)[:, :, NOPE:], random_rotations(16384, ROPE)
    return lambda: rotate(query, rotations, query)


def _segment(
    size: int,
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A pool of twice the segment's blocks, staging, a job that copies scattered blocks of all layers, and checksums.

    The job is there on the host and on the device.
    """
    count = size // (BLOCK_TOKENS * WIDTH * 2) // LAYERS
    pool = random_bfloat16(LAYERS, 2 * count, BLOCK_TOKENS * WIDTH).view(torch.int64)
    staging = torch.randint(1 << 60, (LAYERS * count * pool.shape[2],), device="cuda")
    chunks = -(-8 * len(staging) // CHUNK_BYTES)
    blocks = kv_copy_triton.JOB_HASHES + chunks
    job = torch.zeros(blocks + LAYERS * count, dtype=torch.int64, pin_memory=True)
    job[kv_copy_triton.JOB_BLOCK_COUNT] = count
    job[kv_copy_triton.JOB_SIZE] = 8 * len(staging)
    job[kv_copy_triton.JOB_TABLE : kv_copy_triton.JOB_WRONG] = torch.from_numpy(seeded_table(77).copy())
    job[blocks : blocks + count] = torch.randperm(2 * count)[:count]
    sums = torch.empty(chunks * kv_copy_triton.SUMS_OF_CHUNK, dtype=torch.int64, device="cuda")
    return [pool], staging, job, job.cuda(), sums


def _gather_call(size: int) -> Callable[[], object]:
    return partial(kv_copy_triton.launch_hashes, *_segment(size), gather=True)


def _compare_call(size: int) -> Callable[[], object]:
    return partial(kv_copy_triton.launch_hashes, *_segment(size), gather=False)


def _scatter_call(size: int) -> Callable[[], object]:
    planes, staging, _, job, _ = _segment(size)
    return lambda: kv_copy_triton.launch_scatter(planes, staging, job)
