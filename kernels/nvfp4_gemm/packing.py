"""The order of an NVFP4 matrix's codes and scales in which the threads of a warpgroup take them.

A tile is 64 outputs by 128 inputs, 4,096 bytes of codes and 512 of scales. The tiles of the same inputs lie together,
one for each 64 outputs, then those of the next 128 inputs.
"""

import torch

from kernels.nvfp4_quant import GROUP

TILE_OUTPUTS, TILE_INPUTS = 64, 128
CODE_BYTES, SCALE_BYTES = TILE_OUTPUTS * TILE_INPUTS // 2, TILE_OUTPUTS * TILE_INPUTS // GROUP

# A tile's outputs as a warpgroup's product has them: warps of 16, of which a thread holds two that are 8 apart.
OUTPUT_SPLIT = (4, 2, 8)
# A tile's inputs likewise: halves of four products of 16 inputs, in each half of which each of 4 threads holds a pair.
INPUT_SPLIT = (2, 4, 2, 4, 2)

# Where a code's magnitude and sign go in the two bf16 numbers of a word.
MAGNITUDES, SIGNS = 0x01C001C0, 0x80008000
NAN = 0x7F
ONE = 0x38
# Packed scales' exponents are those of the numbers plus this.
EXPONENT_BIAS = 21


def pack(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """codes: [outputs, inputs / 2] uint8; scales: [outputs, inputs / 16] float8_e4m3fn; outputs a multiple of 64,
    inputs of 128.

    Returns uint8 [inputs / 128, outputs / 64, 4096] and [inputs / 128, outputs / 64, 512]. The matrix's values stay the
    same: a scale's sign moves to its codes, and a scale of 0 becomes 1 while its codes become 0.
    """
    outputs, groups = scales.shape
    assert codes.shape == (outputs, groups * GROUP // 2)
    assert outputs % TILE_OUTPUTS == 0 and groups * GROUP % TILE_INPUTS == 0
    raw = scales.view(torch.uint8)
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).view(outputs, groups, GROUP)
    nibbles ^= (raw >> 7 << 3).unsqueeze(2)
    nibbles &= torch.where(raw & 0x7F == 0, 8, 15).to(torch.uint8).unsqueeze(2)
    return _pack_codes(nibbles.flatten(1)), _pack_scales(_unsigned(raw & 0x7F))


def unpack(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix that `pack` packed. Codes and scales may differ from the original ones, their values do not."""
    return _unpack_codes(codes), _signed(_unpack_scales(scales)).view(torch.float8_e4m3fn)


def _pack_codes(nibbles: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs] uint8 to [inputs / 128, outputs / 64, 4096] uint8.

    A thread's word holds its 8 codes of a product: the two inputs of a pair in the two halves, and four pairs, which
    `_pairs` takes out again in a few operations.
    """
    split = nibbles.unflatten(1, (-1, *INPUT_SPLIT)).unflatten(0, (-1, *OUTPUT_SPLIT))
    # Dimensions before: tile, warp, which of two outputs, thread / 4, group, half, product, half of it, thread % 4,
    # which of a pair.
    lanes = split.permute(4, 0, 5, 1, 3, 8, 6, 7, 2, 9).flatten(7, 8).long()
    pairs = (lanes & 7) << 6 | (lanes & 8) << 12
    first, second, third, fourth = (pairs[..., 0] | pairs[..., 1] << 16).unbind(-1)
    word = first | second >> 6 | (third << 4 | third >> 28) & 0xFFFFFFFF
    # The fourth pair is the difference of two shifted words, whose other bits are known each time.
    word |= ((fourth ^ word << 2) & 0x01000100) << 6
    for place in (0x00400040, 1 << 31, 1 << 23, 1 << 15, 1 << 7):
        word |= ((fourth ^ word >> 6) & place) >> 2
    return _bytes(word).flatten(2)


def _pairs(word: torch.Tensor) -> torch.Tensor:
    """The four pairs of a word [..., 4], as the kernel takes them out: each code as a bf16 number, 2^-126 times it."""
    parts = word, word << 6, word >> 4 | word << 28, word << 2 ^ word >> 6
    return torch.stack(parts, dim=-1) & (MAGNITUDES | SIGNS)


def _unpack_codes(codes: torch.Tensor) -> torch.Tensor:
    groups, tiles, _ = codes.shape
    pairs = _pairs(_words(codes)).view(groups, tiles, 2, 4, 8, 4, 4, 2, 2, 1) >> torch.tensor([0, 16]).to(codes.device)
    nibbles = (pairs >> 6 & 7 | pairs >> 12 & 8).to(torch.uint8)
    split = nibbles.permute(1, 3, 8, 4, 0, 2, 6, 7, 5, 9)
    flat = split.flatten(4).flatten(0, 3)
    return flat[:, 0::2] | flat[:, 1::2] << 4


def _unsigned(scales: torch.Tensor) -> torch.Tensor:
    """e4m3 without a sign to five bits of exponent and three of mantissa, without subnormals or zero, which is 1 here.
    As bits 11 to 4 of a bf16 number whose three other bits of exponent are set, they are 2^118 times the scale.
    """
    return _table(scales.device)[scales.long()]


def _signed(scales: torch.Tensor) -> torch.Tensor:
    inverse = torch.zeros(256, dtype=torch.uint8, device=scales.device)
    # Without the entry of zero, which is that of 1.
    inverse[_table(scales.device)[1:].long()] = torch.arange(1, 128, dtype=torch.uint8, device=scales.device)
    return inverse[scales.long()]


def _table(device: torch.device) -> torch.Tensor:
    numbers = torch.arange(128, dtype=torch.uint8)
    numbers[0] = ONE
    mantissas, exponents = torch.frexp(numbers.view(torch.float8_e4m3fn).float())
    table = (exponents - 1 + EXPONENT_BIAS) * 8 + mantissas.mul(16).nan_to_num() - 8
    table[NAN] = 0xFF
    return table.to(torch.uint8).to(device)


def _pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """[outputs, groups of 16] uint8 to [inputs / 128, outputs / 64, 512] uint8.

    A thread's word holds its scales of two products: those of its first output in the lower half, the first product's
    in bits 11 to 4, and the second's there if the half's bytes are swapped.
    """
    split = scales.unflatten(1, (-1, 2, 2, 2)).unflatten(0, (-1, *OUTPUT_SPLIT))
    # Dimensions before: tile, warp, which of two outputs, thread / 4, group, half, pair of products, which of two
    # products.
    lanes = split.permute(4, 0, 5, 1, 3, 6, 2, 7).long()
    first, second = lanes.unbind(-1)
    halves = first << 4 | second >> 4 | (second & 15) << 12
    return _bytes(halves[..., 0] | halves[..., 1] << 16).flatten(2)


def _unpack_scales(scales: torch.Tensor) -> torch.Tensor:
    groups, tiles, _ = scales.shape
    words = _words(scales).view(groups, tiles, 2, 4, 8, 2)
    halves = torch.stack([words & 0xFFFF, words >> 16], dim=-1)
    lanes = torch.stack([halves >> 4 & 0xFF, (halves & 15) << 4 | halves >> 12], dim=-1).to(torch.uint8)
    split = lanes.permute(1, 3, 6, 4, 0, 2, 5, 7)
    return split.flatten(4).flatten(0, 3)


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """[...] int64 of 32 bits to [..., 4] uint8, the lowest first."""
    return words.view(torch.uint8).view(*words.shape, 8)[..., :4].contiguous()


def _words(packed: torch.Tensor) -> torch.Tensor:
    """[..., bytes] uint8 to [..., bytes / 4] int64."""
    return packed.contiguous().view(torch.int32).long() & 0xFFFFFFFF
