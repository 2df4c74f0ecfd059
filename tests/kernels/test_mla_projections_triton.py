"""Triton's products around absorbed attention against their definitions: on a GPU, elsewhere interpreted."""

import pytest
import torch

from kernels.act_quant import dequantize
from kernels.act_quant.reference import quantize
from kernels.mla_projections import reference

pytest.importorskip("triton")

from kernels.mla_projections import triton as triton_projections

ON_GPU = torch.cuda.is_available()
ERROR, QUANTIZED_ERROR = 5e-3, 0.03
pytestmark = pytest.mark.usefixtures("poisoned")
TOKENS = [0, 1, 17, 150, 300] if ON_GPU else [0, 1, 17, 70]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def by_head(heads: int, width: int, latent: int, device: torch.device) -> torch.Tensor:
    """[heads, width, latent], a part of a wider matrix, as the two up-projections are."""
    return torch.randn(heads, 2 * width, latent, device=device).bfloat16()[:, width:]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("heads", "nope", "rope", "latent"), [(3, 32, 8, 96), (2, 128, 64, 512)])
def test_tokens_are_absorbed_as_defined(
    tokens: int, heads: int, nope: int, rope: int, latent: int, device: torch.device
) -> None:
    # Some rows of a wider matrix: neither rows nor heads lie next to each other.
    query = torch.randn(tokens, heads + 1, nope + rope, device=device).bfloat16()[:, 1:]
    rotations = torch.randn(tokens, rope // 2, dtype=torch.complex64, device=device)
    weight = by_head(heads, nope, latent, device)
    found = triton_projections.absorb_query(query, weight, rotations)
    expected = reference.absorb_query(query.float(), weight.float(), rotations)
    assert found.shape == expected.shape and found.dtype == torch.bfloat16
    assert error(found[:, :, :latent], expected[:, :, :latent]) < ERROR
    assert error(found[:, :, latent:], expected[:, :, latent:]) < ERROR


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("heads", "latent"), [(5, 208), (2, 512)])
def test_latents_are_expanded_and_quantized_as_defined(
    tokens: int, heads: int, latent: int, device: torch.device
) -> None:
    attended, weight = torch.randn(tokens, heads, latent, device=device).bfloat16(), by_head(heads, 128, latent, device)
    found = triton_projections.expand_values_quantized(attended, weight.transpose(1, 2))
    expected = quantize(reference.expand_values(attended.float(), weight.float().transpose(1, 2)).flatten(1))
    assert torch.allclose(found.scales, expected.scales, rtol=1e-3)
    assert error(dequantize(found), dequantize(expected)) < QUANTIZED_ERROR


def test_widths_that_make_no_whole_tiles_are_left_to_the_definition() -> None:
    assert triton_projections.takes_queries(nope=128, rope=64, latent=512)
    assert not triton_projections.takes_queries(nope=96, rope=64, latent=512)
    assert not triton_projections.takes_queries(nope=128, rope=2, latent=512)
    assert triton_projections.takes_values(latent=512, value=128)
    assert not triton_projections.takes_values(latent=512, value=256)
