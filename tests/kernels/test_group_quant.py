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
