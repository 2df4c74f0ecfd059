"""INT4 weights in groups of 128 inputs."""

import pytest
import torch

from kernels.group_quant import dequantize_groups, quantize_groups
from kernels.w4a8_gemm import pack_tiles, unpack_tiles


@pytest.mark.parametrize(("outputs", "inputs"), [(0, 128), (1, 128), (192, 384)])
def test_every_weight_is_within_half_a_step_of_its_integer(outputs: int, inputs: int) -> None:
    weight = torch.randn(outputs, inputs)
    packed, scales = quantize_groups(weight)
    assert packed.shape == (outputs, inputs // 2) and scales.shape == (outputs, inputs // 128)
    steps = scales.repeat_interleave(128, dim=1)
    # A scale that bfloat16 rounds down may leave the largest weight of its group a little farther.
    assert ((dequantize_groups(packed, scales) - weight).abs() <= 0.515 * steps).all()


def test_a_group_of_zeros_stays_zero() -> None:
    packed, scales = quantize_groups(torch.zeros(2, 256))
    assert not packed.any() and torch.equal(scales, torch.ones(2, 2))


def test_kernels_read_what_was_quantized() -> None:
    packed, scales = quantize_groups(torch.randn(64, 256))
    integers, kept = unpack_tiles(pack_tiles(packed, scales))
    assert torch.equal(kept.float(), scales)
    assert torch.equal(integers.float() * scales.repeat_interleave(128, 1), dequantize_groups(packed, scales))


def test_clipping_lowers_the_error_that_counts() -> None:
    weight, importance = torch.randn(64, 256), torch.rand(256).pow(6)

    def weighted_error(packed: torch.Tensor, scales: torch.Tensor) -> float:
        return float(((dequantize_groups(packed, scales) - weight).square() * importance).sum())

    plain, clipped = quantize_groups(weight), quantize_groups(weight, importance)
    assert weighted_error(*clipped) < 0.9 * weighted_error(*plain)
    assert (clipped[1] <= plain[1]).all()


@pytest.mark.parametrize("clipped", [False, True])
def test_the_integer_that_takes_longer_to_decode_is_never_written(clipped: bool) -> None:
    weight = torch.cat([-torch.rand(32, 128), torch.randn(32, 128)])
    packed, _ = quantize_groups(weight, torch.rand(128) if clipped else None)
    assert not any(bool(((packed >> shift) & 15).eq(8).any()) for shift in (0, 4))


def test_zeros_are_not_clipped() -> None:
    packed, scales = quantize_groups(torch.zeros(2, 128), torch.ones(128))
    assert not packed.any() and torch.equal(scales, torch.ones(2, 1))
