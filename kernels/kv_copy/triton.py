"""Latents out of the pool, blocks in and out of staging, and hashes of what is staged, in Triton."""

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.host_copy import to_device
from kernels.kv_copy import xxh3

WORDS = 2048


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


# A program copies 16 KiB of a piece, one block of one layer. Reads and writes 8 bytes a word. Compiled once, for
# segments of all sizes.
@triton.jit(do_not_specialize=["block_count", "first_layer"])
def _copy_pieces(
    pool, staging, block_ids, block_count, pool_blocks, first_layer, piece_words,
    GATHER: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    block = tl.load(block_ids + piece % block_count)
    layer = first_layer + piece // block_count
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = word < piece_words
    stored = pool + (layer.to(tl.int64) * pool_blocks + block) * piece_words + word
    staged = staging + piece.to(tl.int64) * piece_words + word
    if GATHER:
        tl.store(staged, tl.load(stored, mask=inside), mask=inside)
    else:
        tl.store(stored, tl.load(staged, mask=inside), mask=inside)


def gather_blocks(
    pool: torch.Tensor, first_layer: int, layers: int, blocks: torch.Tensor, staging: torch.Tensor
) -> None:
    _launch_copy(pool, first_layer, layers, blocks, staging, gather=True)


def scatter_blocks(
    staging: torch.Tensor, pool: torch.Tensor, first_layer: int, layers: int, blocks: torch.Tensor
) -> None:
    _launch_copy(pool, first_layer, layers, blocks, staging, gather=False)


def _launch_copy(
    pool: torch.Tensor, first_layer: int, layers: int, blocks: torch.Tensor, staging: torch.Tensor, *, gather: bool
) -> None:
    count = blocks.shape[0]
    words = pool.flatten(2).view(torch.uint8).view(torch.int64)
    piece_words = words.shape[2]
    staged = staging[: layers * count * piece_words * 8].view(torch.int64)
    if count and layers:
        _copy_pieces[(layers * count, triton.cdiv(piece_words, WORDS))](
            words, staged, blocks, count, pool.shape[1], first_layer, piece_words, gather, WORDS,
            num_warps=8,
        )  # fmt: skip


@triton.jit
def _mixed(data, swapped, secret):
    """What a stripe's lane adds to its accumulator."""
    keyed = data ^ secret
    return swapped + (keyed & 0xFFFFFFFF) * (keyed >> 32)


# A program hashes one chunk. Its accumulators are scrambled after each KiB: 64 dependent steps of few instructions,
# 16 of them behind each load of 16 KiB; what each KiB adds is summed before. Reads 1 byte a byte.
@triton.jit(do_not_specialize=["size"])
def _hash_chunks(data, words, table, hashes, size, CHUNK_BYTES: tl.constexpr, SECRET: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    chunk_size = tl.minimum(size - chunk * CHUNK_BYTES, CHUNK_BYTES)
    # The last stripe is hashed apart.
    stripes = (chunk_size - 1) // 64
    blocks = (chunk_size - 1) // 1024
    lane = tl.arange(0, 8)
    scramble = tl.load(table + 16 + lane).to(tl.uint64, bitcast=True)
    last_secret = tl.load(table + SECRET + lane).to(tl.uint64, bitcast=True)
    merge_secret = tl.load(table + SECRET + 8 + lane).to(tl.uint64, bitcast=True)
    accumulator = tl.load(table + SECRET + 16 + lane).to(tl.uint64, bitcast=True)
    multiplier = tl.full([8], 0x9E3779B1, tl.uint64)
    word = tl.arange(0, 2048)
    secret = tl.load(table + word // 8 % 16 + word % 8).to(tl.uint64, bitcast=True)
    row = tl.arange(0, 16)[:, None]
    for part in range(CHUNK_BYTES // (16 << 10)):
        inside = part * 256 + word // 8 < stripes
        found = tl.load(words + chunk * (CHUNK_BYTES // 8) + part * 2048 + word, mask=inside, other=0)
        added = _added_by_blocks(found.to(tl.uint64, bitcast=True), secret, inside)
        for index in tl.static_range(16):
            block = part * 16 + index
            summed = accumulator + tl.sum(tl.where(row == index, added, 0), axis=0)
            scrambled = (summed ^ (summed >> 47) ^ scramble) * multiplier
            accumulator = tl.where(block < blocks, scrambled, tl.where(block == blocks, summed, accumulator))
    # The last 64 bytes, which may overlap the stripe before and begin at any byte.
    last = data + chunk * CHUNK_BYTES + chunk_size - 64
    own = _word(last, lane)
    accumulator += _mixed(own, _word(last, lane ^ 1), last_secret)
    left, right = tl.split(tl.reshape(accumulator ^ merge_secret, [4, 2]))
    folded = (left * right) ^ tl.umulhi(left, right)
    result = tl.sum(folded, axis=0) + chunk_size.to(tl.uint64) * tl.full([], 0x9E3779B185EBCA87, tl.uint64)
    result = (result ^ (result >> 37)) * tl.full([], 0x165667919E3779F9, tl.uint64)
    tl.store(hashes + chunk, (result ^ (result >> 32)).to(tl.int64, bitcast=True))


@triton.jit
def _added_by_blocks(found, secret, inside):
    """What each of 16 KiB adds to the accumulators: [16, 8]."""
    keyed = found ^ secret
    mixed = tl.where(inside, (keyed & 0xFFFFFFFF) * (keyed >> 32), 0)
    # A lane's word itself goes to its neighbour's accumulator.
    even_word, odd_word = tl.split(tl.reshape(found, [16, 16, 4, 2]))
    even, odd = tl.split(tl.reshape(mixed, [16, 16, 4, 2]))
    added = tl.join(tl.sum(even + odd_word, axis=1), tl.sum(odd + even_word, axis=1))
    return tl.reshape(added, [16, 8])


@triton.jit
def _word(start, lane):
    """Eight little-endian bytes at any address."""
    word = tl.zeros([8], tl.uint64)
    for byte in tl.static_range(8):
        word |= tl.load(start + lane * 8 + byte).to(tl.uint64) << (8 * byte)
    return word


def seeded_table(seed: int, device: torch.device) -> torch.Tensor:
    return to_device(np.array(xxh3.seeded_table(seed), np.int64), device)


def launch_hashes(data: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """table: of `seeded_table`. Returns [chunks] int64 on the device."""
    size = data.shape[0]
    chunks = triton.cdiv(size, xxh3.CHUNK_BYTES)
    hashes = torch.empty(chunks, dtype=torch.int64, device=data.device)
    words = data[: size // 8 * 8].view(torch.int64)
    _hash_chunks[(chunks,)](data, words, table, hashes, size, xxh3.CHUNK_BYTES, xxh3.SECRET_WORDS, num_warps=4)
    return hashes
