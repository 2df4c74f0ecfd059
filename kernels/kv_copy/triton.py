"""Latents out of the pool, blocks in and out of staging, and hashes of what is staged, in Triton."""

import torch
import triton
import triton.language as tl

from kernels.kv_copy import xxh3

WORDS = 2048
# What is to be done with a segment, in int64 words: the first layer, how many blocks, how many pieces in all, how many
# bytes are hashed, the table of their seed, and the blocks.
JOB_FIRST_LAYER, JOB_BLOCK_COUNT, JOB_PIECES, JOB_SIZE, JOB_TABLE = range(5)
JOB_BLOCKS = JOB_TABLE + xxh3.TABLE_WORDS
# What the KiB of a chunk add to its accumulators.
SUMS_OF_CHUNK = xxh3.CHUNK_BYTES // 1024 * 8
# Behind the hashes: 256 bytes for a rest.
REST_WORDS = 32


@triton.jit
def compress(x, scale):
    """float32 to e4m3, clamped to its range."""
    return tl.minimum(tl.maximum(tl.div_rn(x, scale), -448.0), 448.0).to(tl.float8e4nv)


# A program reads one latent. Reads 1 byte a value, writes 2.
@triton.jit
def _read(pool, slots, out, width, scale, PADDED: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    stored = tl.load(pool + tl.load(slots + token) * width + column, mask=column < width, other=0.0)
    latent = (stored.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + token * width + column, latent, mask=column < width)


def read_latents(pool: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    tokens, width = slots.shape[0], pool.shape[2]
    out = torch.empty(tokens, width, dtype=dtype, device=pool.device)
    if tokens:
        _read[(tokens,)](pool, slots, out, width, scale, triton.next_power_of_2(width), num_warps=2)
    return out


# A program copies 16 KiB of a piece, one block of one layer. Reads and writes 8 bytes a word.
@triton.jit
def _copy_pieces(
    pool, staging, job, pool_blocks, piece_words,
    GATHER: tl.constexpr, WORDS: tl.constexpr, FIRST_LAYER: tl.constexpr, BLOCK_COUNT: tl.constexpr,
    PIECES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0).to(tl.int64)
    if piece < tl.load(job + PIECES):
        count = tl.load(job + BLOCK_COUNT)
        block = tl.load(job + BLOCKS + piece % count)
        layer = tl.load(job + FIRST_LAYER) + piece // count
        word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
        inside = word < piece_words
        stored = pool + (layer * pool_blocks + block) * piece_words + word
        staged = staging + piece * piece_words + word
        if GATHER:
            tl.store(staged, tl.load(stored, mask=inside), mask=inside)
        else:
            tl.store(stored, tl.load(staged, mask=inside), mask=inside)


def launch_copy(
    pool: torch.Tensor, staging: torch.Tensor, job: torch.Tensor, most_pieces: int, *, gather: bool
) -> None:
    """job: int64, see above. At most so many pieces."""
    words = pool.flatten(2).view(torch.uint8).view(torch.int64)
    piece_words = words.shape[2]
    staged = staging[: most_pieces * piece_words * 8].view(torch.int64)
    _copy_pieces[(most_pieces, triton.cdiv(piece_words, WORDS))](
        words, staged, job, pool.shape[1], piece_words,
        gather, WORDS, JOB_FIRST_LAYER, JOB_BLOCK_COUNT, JOB_PIECES, JOB_BLOCKS,
        num_warps=8,
    )  # fmt: skip


@triton.jit
def _mixed(data, swapped, secret):
    """What a stripe's lane adds to its accumulator."""
    keyed = data ^ secret
    return swapped + (keyed & 0xFFFFFFFF) * (keyed >> 32)


# A program hashes one chunk: first what each KiB adds to the accumulators, by way of `sums`, then 64 dependent steps of
# few instructions, as they are scrambled after each KiB. Reads 1 byte a byte. A rest too short for that is copied.
@triton.jit
def _hash_chunks(
    data, words, job, sums, hashes, rest,
    CHUNK_BYTES: tl.constexpr, SHORTEST: tl.constexpr, SECRET: tl.constexpr, SIZE: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    chunk_size = tl.minimum(tl.load(job + SIZE) - chunk * CHUNK_BYTES, CHUNK_BYTES)
    if chunk_size >= SHORTEST:
        chunk_sums = sums + chunk * (CHUNK_BYTES // 1024) * 8
        _sum_blocks(words + chunk * (CHUNK_BYTES // 8), job + TABLE, chunk_sums, chunk_size, CHUNK_BYTES)
        tl.debug_barrier()
        result = _fold(data + chunk * CHUNK_BYTES, job + TABLE, chunk_sums, chunk_size, CHUNK_BYTES, SECRET)
        tl.store(hashes + chunk, result.to(tl.int64, bitcast=True))
    elif chunk_size > 0:
        byte = tl.arange(0, 256)
        inside = byte < chunk_size
        tl.store(rest + byte, tl.load(data + chunk * CHUNK_BYTES + byte, mask=inside, other=0), mask=inside)


@triton.jit
def _sum_blocks(words, table, sums, chunk_size, CHUNK_BYTES: tl.constexpr):
    # The last stripe is hashed apart.
    stripes = (chunk_size - 1) // 64
    word = tl.arange(0, 2048)
    secret = tl.load(table + word // 8 % 16 + word % 8).to(tl.uint64, bitcast=True)
    for part in tl.static_range(CHUNK_BYTES // (16 << 10)):
        inside = part * 256 + word // 8 < stripes
        found = tl.load(words + part * 2048 + word, mask=inside, other=0)
        added = _added_by_blocks(found.to(tl.uint64, bitcast=True), secret, inside)
        tl.store(sums + part * 128 + tl.arange(0, 128), added.to(tl.int64, bitcast=True))


@triton.jit
def _added_by_blocks(found, secret, inside):
    """What each of 16 KiB adds to the accumulators: [128]."""
    keyed = found ^ secret
    mixed = tl.where(inside, (keyed & 0xFFFFFFFF) * (keyed >> 32), 0)
    # A lane's word itself goes to its neighbour's accumulator.
    even_word, odd_word = tl.split(tl.reshape(found, [16, 16, 4, 2]))
    even, odd = tl.split(tl.reshape(mixed, [16, 16, 4, 2]))
    added = tl.join(tl.sum(even + odd_word, axis=1), tl.sum(odd + even_word, axis=1))
    return tl.reshape(added, [128])


@triton.jit
def _fold(data, table, sums, chunk_size, CHUNK_BYTES: tl.constexpr, SECRET: tl.constexpr):
    blocks = (chunk_size - 1) // 1024
    lane = tl.arange(0, 8)
    scramble = tl.load(table + 16 + lane).to(tl.uint64, bitcast=True)
    last_secret = tl.load(table + SECRET + lane).to(tl.uint64, bitcast=True)
    merge_secret = tl.load(table + SECRET + 8 + lane).to(tl.uint64, bitcast=True)
    accumulator = tl.load(table + SECRET + 16 + lane).to(tl.uint64, bitcast=True)
    multiplier = tl.full([8], 0x9E3779B1, tl.uint64)
    for block in tl.static_range(CHUNK_BYTES // 1024):
        summed = accumulator + tl.load(sums + block * 8 + lane).to(tl.uint64, bitcast=True)
        scrambled = (summed ^ (summed >> 47) ^ scramble) * multiplier
        accumulator = tl.where(block < blocks, scrambled, tl.where(block == blocks, summed, accumulator))
    # The last 64 bytes, which may overlap the stripe before and begin at any byte.
    own = _word(data + chunk_size - 64, lane)
    accumulator += _mixed(own, _word(data + chunk_size - 64, lane ^ 1), last_secret)
    left, right = tl.split(tl.reshape(accumulator ^ merge_secret, [4, 2]))
    folded = (left * right) ^ tl.umulhi(left, right)
    result = tl.sum(folded, axis=0) + chunk_size.to(tl.uint64) * tl.full([], 0x9E3779B185EBCA87, tl.uint64)
    result = (result ^ (result >> 37)) * tl.full([], 0x165667919E3779F9, tl.uint64)
    return result ^ (result >> 32)


@triton.jit
def _word(start, lane):
    """Eight little-endian bytes at any address."""
    word = tl.zeros([8], tl.uint64)
    for byte in tl.static_range(8):
        word |= tl.load(start + lane * 8 + byte).to(tl.uint64) << (8 * byte)
    return word


def launch_hashes(staging: torch.Tensor, job: torch.Tensor, sums: torch.Tensor, hashes: torch.Tensor) -> None:
    """job, sums, hashes: int64, see above. Room for as many as the staging buffer has chunks."""
    chunks = triton.cdiv(staging.shape[0], xxh3.CHUNK_BYTES)
    words = staging[: staging.shape[0] // 8 * 8].view(torch.int64)
    _hash_chunks[(chunks,)](
        staging, words, job, sums, hashes, hashes[-REST_WORDS:].view(torch.uint8),
        xxh3.CHUNK_BYTES, xxh3.SHORTEST_LONG, xxh3.SECRET_WORDS, JOB_SIZE, JOB_TABLE,
        num_warps=4,
    )  # fmt: skip
