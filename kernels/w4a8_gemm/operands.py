"""What the products multiply: rows in FP8 whose scale does not vary along a row, and the experts' INT4 matrices, in the
order in which the threads of a warpgroup take them.
"""

from dataclasses import dataclass

import torch

from kernels.w4a8_gemm.tiling import H200, TilingTable

# Outputs and inputs of a tile: two weights a byte, then a bfloat16 scale of each output and group of inputs.
TILE_OUTPUTS, TILE_INPUTS = 64, 128
WEIGHT_BYTES = TILE_OUTPUTS * TILE_INPUTS // 2
# Inputs that may share a scale.
GROUPS = (32, 128)

# A tile's outputs as a warpgroup's product has them: warps of 16, of which a thread holds two that are 8 apart.
OUTPUT_SPLIT = (4, 2, 8)
# Outputs of gate and of up that follow each other in turns: a thread then holds both of what is gated.
TURN = OUTPUT_SPLIT[-1]
# A tile's inputs likewise: two loads of 16 bytes a thread, each for two products of 32 inputs, of whose two halves a
# thread holds 4 inputs each; 4 threads hold the 16 of a half.
INPUT_SPLIT = (2, 2, 2, 4, 4)


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """x ~ values * scale, one scale for each row, or for all rows of an expert."""

    # [rows, width] or [experts, capacity, width] float8_e4m3fn, contiguous.
    values: torch.Tensor
    # float32, contiguous: [experts] (static, from calibration) or the values' leading dimensions (per token).
    scales: torch.Tensor
    # Whether `scales` are one for each expert (static) or one for each row.
    static: bool

    def __post_init__(self) -> None:
        assert self.values.dtype == torch.float8_e4m3fn and self.values.is_contiguous()
        assert self.scales.dtype == torch.float32 and self.scales.is_contiguous()
        assert self.scales.dim() == 1 if self.static else self.scales.shape == self.values.shape[:-1]


@dataclass(frozen=True, slots=True)
class Int4Experts:
    """w ~ integers in [-8, 7] * scales, each scale over one output's group of inputs."""

    # [experts, outputs / 64, inputs / 128, tile's bytes] uint8, contiguous: see `pack_tiles`.
    tiles: torch.Tensor
    # Whether any weight is -8, which takes longer to decode. Scales of absmax / 7 leave none.
    has_minimum: bool
    # [1] int32, zero between calls: the Hopper kernel's own counter. Calls must not overlap.
    drawn: torch.Tensor
    # For the product on Hopper, by the rows that an expert expects.
    tilings: TilingTable = H200

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs, inputs."""
        experts, outputs, groups, _ = self.tiles.shape
        return experts, outputs * TILE_OUTPUTS, groups * TILE_INPUTS

    @property
    def group(self) -> int:
        """Inputs that share a scale: one of `GROUPS`."""
        return group_of(self.tiles)


def tile_bytes(group: int) -> int:
    return WEIGHT_BYTES + TILE_OUTPUTS * (TILE_INPUTS // group) * 2


def group_of(tiles: torch.Tensor) -> int:
    """Inputs that share a scale, by the tiles' bytes."""
    return next(group for group in GROUPS if tile_bytes(group) == tiles.shape[-1])


def int4_experts(tiles: torch.Tensor) -> Int4Experts:
    """tiles: [experts, outputs / 64, inputs / 128, tile's bytes] uint8. Looks through them for -8; once, after
    loading.
    """
    return _int4_experts(tiles, any(_holds_minimum(expert) for expert in tiles))


def _int4_experts(tiles: torch.Tensor, has_minimum: bool) -> Int4Experts:
    assert tiles.dim() == 4 and tiles.shape[-1] in map(tile_bytes, GROUPS)
    assert tiles.dtype == torch.uint8 and tiles.is_contiguous()
    return Int4Experts(tiles, has_minimum, torch.zeros(1, dtype=torch.int32, device=tiles.device))


def published_places(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where tiles [..., outputs / 64, inputs / 128, tile's bytes] uint8 have their weights and scales before they are
    packed: [..., outputs / 64, 64, inputs / 128, columns of a tile], int8 with two weights a byte, and bfloat16.
    """
    values = tiles[..., :WEIGHT_BYTES].view(torch.int8).unflatten(-1, (TILE_OUTPUTS, -1))
    scales = tiles[..., WEIGHT_BYTES:].view(torch.bfloat16).unflatten(-1, (TILE_OUTPUTS, -1))
    return values.transpose(-3, -2), scales.transpose(-3, -2)


def pack_published(tiles: torch.Tensor, in_turns: bool) -> Int4Experts:
    """Pack tiles [experts, outputs / 64, inputs / 128, tile's bytes] uint8, contiguous, in place, and look through them
    for -8. They have their weights and scales in `published_places`. in_turns: outputs are gate's and then up's, and
    take turns of 8 when packed.
    """
    if not tiles.is_cuda:
        # Expert by expert: packing takes several times an expert's bytes.
        for each in tiles:
            matrices = [place.flatten(-2).flatten(0, 1) for place in published_places(each)]
            each.copy_(pack_tiles(*map(take_turns, matrices) if in_turns else matrices))
        return int4_experts(tiles)
    from kernels.w4a8_gemm import triton

    return _int4_experts(tiles, triton.pack_published(tiles, in_turns))


def take_turns(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [2 * width, ...], gate's outputs and then up's. Returns them in turns of 8; width a multiple of 8."""
    assert len(gate_up) % (2 * TURN) == 0
    turns: torch.Tensor = gate_up.unflatten(0, (2, -1, TURN)).transpose(0, 1)
    return turns.flatten(0, 2)


def gate_and_up(outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., 2 * width] whose outputs took turns to [..., width] each."""
    gate, up = outputs.unflatten(-1, (-1, 2, TURN)).unbind(-2)
    return gate.flatten(-2), up.flatten(-2)


def pack_tiles(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """weight: [..., outputs, inputs / 2] int8, two signed weights a byte, the first in the low half; scales: [...,
    outputs, inputs / group] float32 or bfloat16; outputs a multiple of 64, inputs of 128.

    Returns [..., outputs / 64, inputs / 128, tile's bytes] uint8; a part of the outputs or inputs gives that part of
    the tiles. Scales are rounded to bfloat16. Takes several bytes a weight meanwhile: pack expert by expert if memory
    is short.
    """
    *leading, outputs, halves = weight.shape
    assert weight.dtype == torch.int8 and outputs % TILE_OUTPUTS == 0 and halves * 2 % TILE_INPUTS == 0
    assert scales.shape in [(*leading, outputs, halves * 2 // group) for group in GROUPS]
    low, high = (weight << 4) >> 4, weight >> 4
    integers = torch.stack([low, high], dim=-1).flatten(-2)
    return torch.cat([_pack_weights(integers), _pack_scales(scales, halves * 2)], dim=-1)


def unpack_tiles(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `pack_tiles` packed: [..., outputs, inputs] int8, and scales [..., outputs, inputs / group] bfloat16."""
    codes = _codes(tiles)
    magnitudes = torch.where(codes == 8, 8, codes & 7).to(torch.int8)
    integers = torch.where(codes >= 8, -magnitudes, magnitudes)
    return _from_lanes(integers), _unpack_scales(tiles)


def _pack_weights(integers: torch.Tensor) -> torch.Tensor:
    """[..., outputs, inputs] int8 to [..., outputs / 64, inputs / 128, 4096] uint8.

    A weight's code is its sign and three bits of magnitude; -8 is what would be -0. A word holds the codes of 4 inputs
    of two outputs that are 8 apart, so that `word & 0x87878787`, and the same of the word rotated right by 4, are four
    e4m3 numbers each: 2^-9 times the weights, subnormal.
    """
    codes = _to_lanes(integers)
    signs, magnitudes = (codes < 0).to(torch.uint8), (codes.abs() & 7).to(torch.uint8)
    (first_sign, second_sign), (first, second) = signs.unbind(-2), magnitudes.unbind(-2)
    packed = first_sign << 7 | second << 4 | second_sign.roll(1, dims=-1) << 3 | first
    return packed.flatten(-7)


def _codes(tiles: torch.Tensor) -> torch.Tensor:
    """Signs and magnitudes, 4 bits each, in the order of `_to_lanes`."""
    packed = tiles[..., :WEIGHT_BYTES].unflatten(-1, (INPUT_SPLIT[0], OUTPUT_SPLIT[0], OUTPUT_SPLIT[2], 4, 2, 2, 4))
    first = packed >> 4 & 8 | packed & 7
    second = packed.roll(-1, dims=-1) & 8 | packed >> 4 & 7
    return torch.stack([first, second], dim=-2)


def _holds_minimum(tiles: torch.Tensor) -> bool:
    return bool((_codes(tiles) == 8).any())


def _to_lanes(matrix: torch.Tensor) -> torch.Tensor:
    """[..., outputs, inputs] to [..., tiles, groups, load, warp, thread / 4, thread % 4, product, half, of two, 4]."""
    split: torch.Tensor = matrix.unflatten(-1, (-1, *INPUT_SPLIT)).unflatten(-7, (-1, *OUTPUT_SPLIT))
    # Dimensions before: tile, warp, which of two, thread / 4, group, load, product, half, thread % 4, input.
    at = split.dim() - 10
    return split.permute(*range(at), *(at + axis for axis in (0, 4, 5, 1, 3, 8, 6, 7, 2, 9)))


def _from_lanes(lanes: torch.Tensor) -> torch.Tensor:
    at = lanes.dim() - 10
    split = lanes.permute(*range(at), *(at + axis for axis in (0, 3, 8, 4, 1, 2, 6, 7, 5, 9)))
    return split.flatten(-6).flatten(-5, -2)


def _pack_scales(scales: torch.Tensor, inputs: int) -> torch.Tensor:
    """[..., outputs, groups] to [..., outputs / 64, inputs / 128, bytes]: a thread's two scales of a group lie in one
    word, and those of a tile's groups in words that follow each other.
    """
    by_tile = scales.bfloat16().unflatten(-1, (inputs // TILE_INPUTS, -1))
    split: torch.Tensor = by_tile.unflatten(-3, (-1, *OUTPUT_SPLIT))
    # Dimensions before: tile, warp, which of two, thread / 4, tile's inputs, group.
    at = split.dim() - 6
    ordered = split.permute(*range(at), *(at + axis for axis in (0, 4, 1, 3, 5, 2))).contiguous()
    return ordered.flatten(-4).view(torch.uint8)


def _unpack_scales(tiles: torch.Tensor) -> torch.Tensor:
    ordered = tiles[..., WEIGHT_BYTES:].contiguous().view(torch.bfloat16)
    split: torch.Tensor = ordered.unflatten(-1, (OUTPUT_SPLIT[0], OUTPUT_SPLIT[2], -1, OUTPUT_SPLIT[1]))
    at = split.dim() - 6
    return split.permute(*range(at), *(at + axis for axis in (0, 2, 5, 3, 1, 4))).flatten(-2).flatten(at, -2)
