"""NVFP4 weights: what their codes mean, and products with them."""

import pytest
import torch

from kernels.nvfp4_gemm import nvfp4, nvfp4_grouped_gemm
from kernels.nvfp4_gemm.weight import Nvfp4
from kernels.nvfp4_quant import dequantize_nvfp4, quantize_nvfp4
from tests.support.errors import assert_close


def _weight(experts: int, parts: int, part_rows: int, inputs: int, device: str = "cpu") -> Nvfp4:
    matrices = [[quantize_nvfp4(torch.randn(part_rows, inputs)) for _ in range(parts)] for _ in range(experts)]
    codes, scales = (torch.stack([torch.cat([part[i] for part in each]) for each in matrices]) for i in range(2))
    global_scales = torch.tensor([[float(part[2]) for part in each] for each in matrices])
    return nvfp4(codes.to(device), scales.to(device), global_scales.to(device))


def test_all_codes_have_their_published_values() -> None:
    codes = torch.arange(0, 256, dtype=torch.uint8).unsqueeze(1).expand(-1, 8).contiguous()
    values = dequantize_nvfp4(codes, torch.full((256, 1), 0.75).to(torch.float8_e4m3fn))
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    by_code = magnitudes + [-value for value in magnitudes]
    for byte in range(256):
        assert values[byte, :2].tolist() == [0.75 * by_code[byte & 15], 0.75 * by_code[byte >> 4]]


def test_every_product_of_code_and_scale_is_exact_in_bfloat16() -> None:
    finite = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).unsqueeze(1)
    codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8).expand(127, -1)
    values = dequantize_nvfp4(codes.contiguous(), finite)
    assert torch.equal(values.bfloat16().float(), values)


@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e4])
def test_weights_are_within_half_a_step(spread: float) -> None:
    weight = torch.randn(96, 64) * spread
    codes, scales, global_scale = quantize_nvfp4(weight)
    steps = scales.float().repeat_interleave(16, dim=1) * global_scale
    # The widest gap between two magnitudes is 2; scales round by up to a sixteenth.
    assert ((dequantize_nvfp4(codes, scales) * global_scale - weight).abs() <= 1.4 * steps).all()


def test_values_halfway_between_two_codes_get_the_even_one() -> None:
    halfway = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    # One of 6 keeps the group's scale at 1, and the matrix's at 1 / 448.
    weight = torch.tensor([[6.0, *halfway, *(-value for value in halfway), 0.0]])
    codes, scales, global_scale = quantize_nvfp4(weight)
    values = dequantize_nvfp4(codes, scales) * global_scale
    rounded = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert_close(values, torch.tensor([[6.0, *rounded, *(-value for value in rounded), 0.0]]))


def test_matrices_may_share_a_global_scale() -> None:
    small, large = torch.randn(32, 64) * 0.1, torch.randn(32, 64)
    codes, scales, global_scale = quantize_nvfp4(torch.cat([small, large]))
    for rows, weight in ((slice(0, 32), small), (slice(32, 64), large)):
        own = quantize_nvfp4(weight, large.abs().amax())
        assert torch.equal(own[0], codes[rows]) and torch.equal(own[2], global_scale)
        assert torch.equal(own[1].view(torch.uint8), scales[rows].view(torch.uint8))


def test_zeros_stay_zeros() -> None:
    codes, scales, global_scale = quantize_nvfp4(torch.zeros(2, 32))
    assert not (dequantize_nvfp4(codes, scales) * global_scale).any()


@pytest.mark.parametrize("ends", [[5, 5, 21], [0, 0, 1], [40, 41, 140]])
def test_a_product_is_that_of_the_dequantized_matrices(ends: list[int]) -> None:
    weight = _weight(3, 2, 64, 128)
    x = torch.randn(ends[-1], 128).bfloat16()
    out = nvfp4_grouped_gemm(x, weight, torch.tensor(ends, dtype=torch.int32))
    matrices = dequantize_nvfp4(weight.codes, weight.scales)
    matrices *= weight.global_scales.repeat_interleave(64, dim=1).unsqueeze(2)
    start = 0
    for matrix, end in zip(matrices, ends, strict=True):
        expected = x[start:end].float() @ matrix.t()
        assert_close(out[start:end].float(), expected, rtol=2e-2, atol=2e-2)
        start = end


@pytest.mark.parametrize(
    ("experts", "parts", "ends"), [(3, 2, [5, 5, 21]), (1, 1, [1]), (2, 1, [0, 150]), (5, 2, [1, 2, 3, 40, 40])]
)
def test_triton_computes_the_definition(experts: int, parts: int, ends: list[int]) -> None:
    from kernels.nvfp4_gemm import reference, triton

    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = _weight(experts, parts, 64, 192, device)
    x = torch.randn(ends[-1], 192).bfloat16().to(device)
    bounds = torch.tensor(ends, dtype=torch.int32, device=device)
    expected = reference.nvfp4_grouped_gemm(x, weight, bounds)
    assert_close(triton.nvfp4_grouped_gemm(x, weight, bounds), expected, rtol=2e-2, atol=2e-2)
