import pytest
import torch

from kernels.act_quant import dequantize
from kernels.act_quant.reference import quantize
from kernels.mla_decode import Attended
from kernels.mla_projections import absorb_query, expand_values, expand_values_quantized
from kernels.rope import frequencies, rotate_, rotation_table

HEADS, VALUES = 3, 32


def test_absorbed_queries_score_latents_as_their_expanded_keys() -> None:
    query, latent, weight = torch.randn(5, HEADS, 12 + 8), torch.randn(VALUES), torch.randn(HEADS, 12, VALUES)
    rotations = rotation_table(frequencies(8, 10000.0), 50)[[3, 1, 49, 0, 7]]
    absorbed = absorb_query(query, weight, rotations)
    keys = weight @ latent
    assert torch.allclose(absorbed[:, :, :VALUES] @ latent, (query[:, :, :12] * keys).sum(2), rtol=1e-4, atol=1e-4)
    rotate_(query[:, :, 12:], rotations)
    assert torch.equal(absorbed[:, :, VALUES:], query[:, :, 12:])


def test_values_are_expanded_by_head() -> None:
    attended, weight = torch.randn(4, HEADS, VALUES), torch.randn(HEADS, 6, VALUES).transpose(1, 2)
    assert torch.allclose(
        expand_values(Attended(attended), weight), torch.einsum("thl,hlv->thv", attended, weight), atol=1e-5
    )


@pytest.mark.parametrize("tokens", [0, 4])
@pytest.mark.parametrize("width", [64, 128])
def test_quantized_values_lie_head_by_head_in_one_row(tokens: int, width: int) -> None:
    attended, weight = torch.randn(tokens, 4, VALUES), torch.randn(4, width, VALUES).transpose(1, 2)
    found, expected = (
        expand_values_quantized(Attended(attended), weight),
        expand_values(Attended(attended), weight).flatten(1),
    )
    assert found.values.shape == (tokens, 4 * width)
    assert torch.equal(dequantize(found), dequantize(quantize(expected)))
