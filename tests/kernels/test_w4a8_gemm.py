"""INT4 experts: how weights are packed, and the product's definition."""

import pytest
import torch

from kernels.act_quant import quantize
from kernels.moe_permute import expand_contiguous, expand_masked
from kernels.moe_permute.layout import ContiguousLayout, Layout
from kernels.w4a8_gemm import ScaledRows, int4_experts, pack_tiles, unpack_tiles, w4a8_grouped_gemm
from tests.support.errors import relative_error

E4M3 = torch.float8_e4m3fn


def random_integers(*shape: int, lowest: int = -8) -> torch.Tensor:
    return torch.randint(lowest, 8, shape, dtype=torch.int8)


def published(integers: torch.Tensor) -> torch.Tensor:
    """Two a byte, the first in the low half."""
    return (integers[..., 0::2] & 15) | (integers[..., 1::2] << 4)


@pytest.mark.parametrize("shape", [(64, 128), (192, 384), (3, 128, 256), (2, 1, 64, 256)])
@pytest.mark.parametrize(("group", "tile_bytes"), [(128, 4224), (32, 4608)])
def test_unpacking_gives_what_was_packed(group: int, tile_bytes: int, shape: tuple[int, ...]) -> None:
    integers, scales = random_integers(*shape), torch.rand(*shape[:-1], shape[-1] // group).bfloat16()
    tiles = pack_tiles(published(integers), scales.float())
    assert tiles.shape == (*shape[:-2], shape[-2] // 64, shape[-1] // 128, tile_bytes)
    found, found_scales = unpack_tiles(tiles)
    assert torch.equal(found, integers) and torch.equal(found_scales, scales)


@pytest.mark.parametrize("group", [128, 32])
def test_parts_of_a_matrix_are_packed_as_the_whole(group: int) -> None:
    integers, scales = random_integers(256, 512), torch.rand(256, 512 // group)
    whole = pack_tiles(published(integers), scales)
    part = pack_tiles(published(integers[64:192, 256:]), scales[64:192, 256 // group :])
    assert torch.equal(part, whole[1:3, 2:])


def test_two_operations_on_a_word_make_its_weights_numbers() -> None:
    """As the kernel decodes: word w of a thread is for inputs (w / 2) * 32 + (w % 2) * 16 of a product's k."""
    integers = random_integers(64, 128, lowest=-7)
    words = pack_tiles(published(integers), torch.ones(64, 1))[0, 0, :4096].contiguous().view(torch.int32)
    words = words.view(2, 4, 8, 4, 4).long() & 0xFFFFFFFF
    for rotation, offset in ((0, 0), (4, 8)):
        rotated = (words >> rotation) | (words << (32 - rotation))
        numbers = torch.stack([(rotated >> 8 * byte & 0x87).to(torch.uint8) for byte in range(4)], dim=-1)
        weights = numbers.view(E4M3).float() * 512
        # Load, warp, thread / 4, thread % 4, word, input to output and input.
        rows = torch.arange(4).view(1, 4, 1, 1, 1, 1) * 16 + offset + torch.arange(8).view(1, 1, 8, 1, 1, 1)
        load, word = torch.arange(2).view(2, 1, 1, 1, 1, 1), torch.arange(4).view(1, 1, 1, 1, 4, 1)
        quad, byte = torch.arange(4).view(1, 1, 1, 4, 1, 1), torch.arange(4).view(1, 1, 1, 1, 1, 4)
        columns = (load * 2 + word // 2) * 32 + word % 2 * 16 + quad * 4 + byte
        assert torch.equal(weights, integers[rows, columns].float())


@pytest.mark.parametrize(("lowest", "expected"), [(-7, False), (-8, True)])
def test_weights_know_whether_one_is_the_least(lowest: int, expected: bool) -> None:
    tiles = pack_tiles(published(random_integers(2, 64, 256, lowest=lowest)), torch.rand(2, 64, 2))
    assert int4_experts(tiles).has_minimum == expected


def random_layout(tokens: int, experts: int, contiguous: bool) -> Layout:
    # Uneven: half of the tokens share one expert, and the last one has none.
    chosen = torch.randint(1, experts - 1, (tokens, 1))
    chosen[::2] = 0
    expand = expand_contiguous if contiguous else expand_masked
    return expand(quantize(torch.randn(tokens, 128)), chosen, experts).layout


@pytest.mark.parametrize("tokens", [0, 1, 70])
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("group", [128, 32])
def test_each_row_meets_its_experts_weights(group: int, tokens: int, contiguous: bool, static: bool) -> None:
    experts, outputs, inputs = 5, 128, 256
    integers, scales = random_integers(experts, outputs, inputs), torch.rand(experts, outputs, inputs // group)
    scales = scales.bfloat16()
    weight = int4_experts(pack_tiles(published(integers), scales))
    layout = random_layout(tokens, experts, contiguous)
    values = torch.randn(*layout.shape, inputs).to(E4M3)
    x = ScaledRows(values, torch.rand(experts if static else layout.shape), static)
    found = w4a8_grouped_gemm(x, weight, layout)
    assert found.shape == (*layout.shape, outputs) and found.dtype == torch.bfloat16
    dense = (integers.unflatten(-1, (-1, group)).double() * scales.double().unsqueeze(-1)).flatten(-2)
    for row in layout.positions.flatten().tolist():
        if isinstance(layout, ContiguousLayout):
            at: tuple[int, ...] = (row,)
            expert = int(layout.row_experts[row])
        else:
            expert = row // layout.capacity
            at = (expert, row % layout.capacity)
        expected = dense[expert] @ values[at].double() * x.scales[expert if static else at]
        assert relative_error(found[at], expected) < 5e-3
