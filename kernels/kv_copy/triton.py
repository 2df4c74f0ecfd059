"""Reads latents from the pool, copies blocks to and from staging, and hashes what is staged, in Triton."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.act_quant.quantized import GROUP, Quantized, empty_quantized
from kernels.act_quant.triton import quantize_groups
from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.kv_copy import xxh3
from kernels.tile_sizes import cdiv, next_power_of_2

WORDS = 2048
# Kernels address the pool by rows of 256 bytes. A piece, one block of one layer, consists of whole rows.
ROW_WORDS = 32
ROW_BYTES = 8 * ROW_WORDS
# A job says what to do with a segment, in int64 words: first layer, number of blocks, number of bytes, table of the
# hashes' seed, whether a chunk was wrong, hash of each chunk, and the blocks.
JOB_FIRST_LAYER, JOB_BLOCK_COUNT, JOB_SIZE, JOB_TABLE = range(4)
JOB_WRONG = JOB_TABLE + xxh3.TABLE_WORDS
JOB_HASHES = JOB_WRONG + 1
# Words that the KiB of a chunk add to its accumulators.
SUMS_OF_CHUNK = xxh3.CHUNK_BYTES // 1024 * 8


@triton.jit
def compress(x, scale):
    """float32 to e4m3, clamped to its range."""
    return tl.minimum(tl.maximum(tl.div_rn(x, scale), -448.0), 448.0).to(tl.float8e4nv)


# A program reads one latent. Reads a value in the pool's dtype, writes it in that of `out`.
@triton.jit
def _read(pool, slots, out, width, scale, PADDED: tl.constexpr, DEPENDENT: tl.constexpr):
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    stored = tl.load(pool + tl.load(slots + token) * width + column, mask=column < width, other=0.0)
    if out.dtype.element_ty == tl.float8e4nv:
        # Changes nothing that is in e4m3 already: its scale is 1.
        latent = compress(stored.to(tl.float32), scale)
    else:
        latent = (stored.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + token * width + column, latent, mask=column < width)


def read_latents(pool: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    tokens, width = slots.shape[0], pool.shape[2]
    out = torch.empty(tokens, width, dtype=dtype, device=pool.device)
    if tokens:
        launch(_read, (tokens,), pool.device, pool, slots, out, width, scale, next_power_of_2(width), num_warps=2)
    return out


# A program reads one latent, makes e4m3 of a part of it, or keeps that where it is stored so, and converts the rest.
# Reads each value once; writes 1 byte of each that is quantized, 4 of each group of them, and 2 of each other one.
@triton.jit(do_not_specialize=["scale_stride"])
def _read_quantized(
    pool, slots, values, scales, rest, width, quantized, scale, scale_stride,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, REST: tl.constexpr, STORED: tl.constexpr, POWERS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    stored = pool + tl.load(slots + token) * width
    group, other = tl.arange(0, GROUPS), tl.arange(0, REST)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    found = tl.load(stored + column, mask=column < quantized, other=0.0)
    if STORED:
        tl.store(values + token * quantized + column, found, mask=column < quantized)
        tl.store(scales + group * scale_stride + token, scale, mask=group * GROUP < quantized)
    else:
        numbers, factors = quantize_groups(found.to(tl.float32), POWERS)
        tl.store(values + token * quantized + column, numbers, mask=column < quantized)
        tl.store(scales + group * scale_stride + token, factors, mask=group * GROUP < quantized)
    inside = other < width - quantized
    kept = tl.load(stored + quantized + other, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(rest + token * (width - quantized) + other, kept.to(rest.dtype.element_ty), mask=inside)


def read_quantized(
    pool: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, scale: float, width: int, powers: bool
) -> tuple[Quantized, torch.Tensor]:
    tokens, whole = slots.shape[0], pool.shape[2]
    out = empty_quantized(tokens, width, device=pool.device, powers=powers)
    rest = torch.empty(tokens, whole - width, dtype=dtype, device=pool.device)
    if tokens:
        launch(_read_quantized, (tokens,), pool.device,
            pool, slots, out.values, out.scales, rest, whole, width, scale, out.scales.stride(1),
            GROUP, next_power_of_2(width // GROUP), next_power_of_2(whole - width), pool.dtype == out.values.dtype,
            powers, num_warps=1,
        )  # fmt: skip
    return out, rest


# A program copies one latent. Reads and writes each value once.
@triton.jit
def _place(latents, order, pool, slots, width, PADDED: tl.constexpr, DEPENDENT: tl.constexpr):
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    found = tl.load(latents + tl.load(order + token) * width + column, mask=column < width, other=0.0)
    tl.store(pool + tl.load(slots + token) * width + column, found, mask=column < width)


def place_latents(latents: torch.Tensor, order: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> None:
    tokens, width = slots.shape[0], pool.shape[2]
    if tokens:
        launch(_place, (tokens,), pool.device, latents, order, pool, slots, width, next_power_of_2(width), num_warps=2)


# A program copies 4 KiB of a job from pinned memory. This ends before a copy engine would start.
@triton.jit
def _take_job(pinned, job, size, WORDS: tl.constexpr):
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    tl.store(job + word, tl.load(pinned + word, mask=word < size), mask=word < size)


# A program takes 16 KiB of the segment, which it gathers from the pool or which are staged already, and sums what each
# KiB adds to the accumulators of its chunk's hash. Reads each byte once, and writes it once if it gathers.
@triton.jit
def _sum_parts(
    pool, more, staging, job, blocks, sums, pool_blocks,
    GATHER: tl.constexpr, WORDS: tl.constexpr, FIRST_WORDS: tl.constexpr, PIECE_WORDS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    CHUNK_BYTES: tl.constexpr, FIRST_LAYER: tl.constexpr, BLOCK_COUNT: tl.constexpr, SIZE: tl.constexpr,
    TABLE: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    size = tl.load(job + SIZE)
    if part * WORDS * 8 < size:
        row = part * (WORDS // ROW_WORDS) + tl.arange(0, WORDS // ROW_WORDS)
        column = tl.arange(0, ROW_WORDS)[None, :]
        inside = (row * ROW_WORDS * 8 < size)[:, None]
        staged = staging + (row * ROW_WORDS)[:, None] + column
        if GATHER:
            stored = _stored(
                pool, more, job, blocks, pool_blocks, row, size,
                FIRST_WORDS, PIECE_WORDS, ROW_WORDS, FIRST_LAYER, BLOCK_COUNT,
            )  # fmt: skip
            found = tl.load(stored[:, None] + column, mask=inside, other=0)
            tl.store(staged, found, mask=inside)
        else:
            found = tl.load(staged, mask=inside, other=0)
        word = tl.arange(0, WORDS // ROW_WORDS)[:, None] * ROW_WORDS + column
        secret = tl.load(job + TABLE + word // 8 % 16 + word % 8).to(tl.uint64, bitcast=True)
        # The last stripe of a chunk is hashed separately.
        parts = CHUNK_BYTES // (WORDS * 8)
        chunk_size = tl.minimum(size - part // parts * CHUNK_BYTES, CHUNK_BYTES)
        summed = part % parts * (WORDS // 8) + word // 8 < (chunk_size - 1) // 64
        added = _added_by_blocks(found.to(tl.uint64, bitcast=True), secret, summed, WORDS // 128)
        tl.store(sums + part * (WORDS // 16) + tl.arange(0, WORDS // 16), added.to(tl.int64, bitcast=True))


@triton.jit
def _stored(
    pool, more, job, blocks, pool_blocks, row, size,
    FIRST_WORDS: tl.constexpr, PIECE_WORDS: tl.constexpr, ROW_WORDS: tl.constexpr, FIRST_LAYER: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
):  # fmt: skip
    """The addresses of the segment's rows: layer by layer, a piece is one block of a layer. Its first words are in the
    first plane, the others in the second.
    """
    piece = row * ROW_WORDS // PIECE_WORDS
    count = tl.load(job + BLOCK_COUNT)
    block = tl.load(blocks + piece % count, mask=row * ROW_WORDS * 8 < size, other=0)
    index = (tl.load(job + FIRST_LAYER) + piece // count) * pool_blocks + block
    place = row * ROW_WORDS % PIECE_WORDS
    first = pool + index * FIRST_WORDS + place
    if FIRST_WORDS == PIECE_WORDS:
        return first
    second = more + index * (PIECE_WORDS - FIRST_WORDS) + (place - FIRST_WORDS)
    return tl.where(place < FIRST_WORDS, first, second)


@triton.jit
def _added_by_blocks(found, secret, summed, BLOCKS: tl.constexpr):
    """The sums that each KiB adds to the accumulators: [BLOCKS * 8]."""
    found = tl.where(summed, found, 0)
    keyed = found ^ secret
    mixed = tl.where(summed, (keyed & 0xFFFFFFFF) * (keyed >> 32), 0)
    # XXH3 adds a lane's word itself to its neighbour's accumulator.
    even_word, odd_word = tl.split(tl.reshape(found, [BLOCKS, 16, 4, 2]))
    even, odd = tl.split(tl.reshape(mixed, [BLOCKS, 16, 4, 2]))
    added = tl.join(tl.sum(even + odd_word, axis=1), tl.sum(odd + even_word, axis=1))
    return tl.reshape(added, [BLOCKS * 8])


# A program finishes the hash of one chunk in 64 dependent steps of few instructions, since accumulators are scrambled
# after each KiB. It reports the hash to the host, or compares it with the expected one.
@triton.jit
def _hash_chunks(
    staging, job, sums, pinned,
    COMPARE: tl.constexpr, CHUNK_BYTES: tl.constexpr, SECRET: tl.constexpr, SIZE: tl.constexpr, TABLE: tl.constexpr,
    WRONG: tl.constexpr, HASHES: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    chunk_size = tl.minimum(tl.load(job + SIZE) - chunk * CHUNK_BYTES, CHUNK_BYTES)
    if chunk_size > 0:
        last = staging + (chunk * CHUNK_BYTES + chunk_size) // 8 - 8
        chunk_sums = sums + chunk * (CHUNK_BYTES // 1024) * 8
        result = _fold(last, job + TABLE, chunk_sums, chunk_size, CHUNK_BYTES, SECRET).to(tl.int64, bitcast=True)
        if COMPARE:
            differs = result != tl.load(job + HASHES + chunk)
            tl.store(job + WRONG, 1, mask=differs)
            tl.store(pinned + WRONG, 1, mask=differs)
        else:
            tl.store(pinned + HASHES + chunk, result)


@triton.jit
def _fold(last, table, sums, chunk_size, CHUNK_BYTES: tl.constexpr, SECRET: tl.constexpr):
    blocks = (chunk_size - 1) // 1024
    lane = tl.arange(0, 8)
    scramble = tl.load(table + 16 + lane).to(tl.uint64, bitcast=True)
    last_secret = tl.load(table + SECRET + lane).to(tl.uint64, bitcast=True)
    merge_secret = tl.load(table + SECRET + 8 + lane).to(tl.uint64, bitcast=True)
    accumulator = tl.load(table + SECRET + 16 + lane).to(tl.uint64, bitcast=True)
    multiplier = tl.full([8], 0x9E3779B1, tl.uint64)
    # Unrolled as a whole it takes seconds to compile, at a worker's first start.
    for block in tl.range(0, CHUNK_BYTES // 1024, loop_unroll_factor=8):
        summed = accumulator + tl.load(sums + block * 8 + lane).to(tl.uint64, bitcast=True)
        scrambled = (summed ^ (summed >> 47) ^ scramble) * multiplier
        accumulator = tl.where(block < blocks, scrambled, tl.where(block == blocks, summed, accumulator))
    # The last 64 bytes may overlap the stripe before.
    own = tl.load(last + lane).to(tl.uint64, bitcast=True)
    neighbour = tl.load(last + (lane ^ 1)).to(tl.uint64, bitcast=True)
    keyed = own ^ last_secret
    accumulator += neighbour + (keyed & 0xFFFFFFFF) * (keyed >> 32)
    left, right = tl.split(tl.reshape(accumulator ^ merge_secret, [4, 2]))
    folded = (left * right) ^ tl.umulhi(left, right)
    result = tl.sum(folded, axis=0) + chunk_size.to(tl.uint64) * tl.full([], 0x9E3779B185EBCA87, tl.uint64)
    result = (result ^ (result >> 37)) * tl.full([], 0x165667919E3779F9, tl.uint64)
    return result ^ (result >> 32)


# A program copies 16 KiB of the segment to its blocks, unless a chunk's hash was wrong. Reads and writes each byte
# once.
@triton.jit
def _scatter(
    pool, more, staging, job, blocks, pool_blocks,
    WORDS: tl.constexpr, FIRST_WORDS: tl.constexpr, PIECE_WORDS: tl.constexpr, ROW_WORDS: tl.constexpr,
    FIRST_LAYER: tl.constexpr, BLOCK_COUNT: tl.constexpr, SIZE: tl.constexpr, WRONG: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    size = tl.load(job + SIZE)
    if (part * WORDS * 8 < size) & (tl.load(job + WRONG) == 0):
        row = part * (WORDS // ROW_WORDS) + tl.arange(0, WORDS // ROW_WORDS)
        column = tl.arange(0, ROW_WORDS)[None, :]
        inside = (row * ROW_WORDS * 8 < size)[:, None]
        stored = _stored(
            pool, more, job, blocks, pool_blocks, row, size,
            FIRST_WORDS, PIECE_WORDS, ROW_WORDS, FIRST_LAYER, BLOCK_COUNT,
        )  # fmt: skip
        found = tl.load(staging + (row * ROW_WORDS)[:, None] + column, mask=inside, other=0)
        tl.store(stored[:, None] + column, found, mask=inside)


def launch_hashes(
    planes: Sequence[torch.Tensor],
    staging: torch.Tensor,
    pinned: torch.Tensor,
    job: torch.Tensor,
    sums: torch.Tensor,
    *,
    gather: bool,
) -> None:
    """Gather the job's blocks and report their chunks' hashes, or compare what is staged with the job's hashes.

    planes: one or two of [layers, blocks, words], of which a piece consists; staging: [words] of whole pieces; pinned,
    job, sums: int64, see above. The job is read from pinned memory of the host, where the results are reported too;
    `job` is the device's copy of it.
    """
    _take_job[(cdiv(job.shape[0], 512),)](pinned, job, job.shape[0], 512, num_warps=4)
    chunks = cdiv(8 * staging.shape[0], xxh3.CHUNK_BYTES)
    _sum_parts[(cdiv(staging.shape[0], WORDS),)](
        planes[0], planes[-1], staging, job, job[JOB_HASHES + chunks :], sums, planes[0].shape[1],
        gather, WORDS, *_words(planes), ROW_WORDS, xxh3.CHUNK_BYTES,
        JOB_FIRST_LAYER, JOB_BLOCK_COUNT, JOB_SIZE, JOB_TABLE,
        num_warps=4,
    )  # fmt: skip
    _hash_chunks[(chunks,)](
        staging, job, sums, pinned,
        not gather, xxh3.CHUNK_BYTES, xxh3.SECRET_WORDS, JOB_SIZE, JOB_TABLE, JOB_WRONG, JOB_HASHES,
        num_warps=1,
    )  # fmt: skip


def launch_scatter(planes: Sequence[torch.Tensor], staging: torch.Tensor, job: torch.Tensor) -> None:
    """Copy what is staged to the job's blocks if no hash was wrong. Call after `launch_hashes`."""
    chunks = cdiv(8 * staging.shape[0], xxh3.CHUNK_BYTES)
    _scatter[(cdiv(staging.shape[0], WORDS),)](
        planes[0], planes[-1], staging, job, job[JOB_HASHES + chunks :], planes[0].shape[1],
        WORDS, *_words(planes), ROW_WORDS, JOB_FIRST_LAYER, JOB_BLOCK_COUNT, JOB_SIZE, JOB_WRONG,
        num_warps=4,
    )  # fmt: skip


def _words(planes: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Words of a piece in the first plane, and in all."""
    return planes[0].shape[2], sum(plane.shape[2] for plane in planes)
