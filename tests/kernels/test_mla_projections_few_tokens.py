"""The products around absorbed attention for few tokens, on Hopper, against their definitions."""

import pytest
import torch

from bench.kernels.deepseek_r1 import HEADS
from kernels.act_quant import dequantize, empty_quantized
from kernels.act_quant.reference import quantize
from kernels.mla_projections import few_tokens, reference
from kernels.mla_projections.few_tokens import LATENT, ROPE
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper
from tests.support.written_latents import assert_written_and_absorbed

NOPE, VALUE, ERROR, QUANTIZED_ERROR = 128, 128, 5e-3, 0.03
# Around the sizes of a CTA's tile, and some that need several tiles.
TOKENS = [0, 1, 16, 17, 32, 33, 64, 65, 96, 97, 128, 300]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("heads", "nope"), [(3, NOPE), (HEADS, NOPE), (20, 192)])
def test_queries_are_absorbed_as_defined(tokens: int, heads: int, nope: int) -> None:
    # Slices of wider matrices: neither queries nor a head's weights are contiguous.
    query, weight = random(tokens, heads + 1, nope + ROPE)[:, 1:], random(heads, nope + VALUE, LATENT)[:, :nope]
    rotations = torch.randn(tokens, ROPE // 2, dtype=torch.complex64, device="cuda")
    found = few_tokens.absorb_query(query, weight, rotations)
    expected = reference.absorb_query(query.float(), weight.float(), rotations)
    assert found.shape == expected.shape and found.dtype == torch.bfloat16
    assert relative_error(found[:, :, :LATENT], expected[:, :, :LATENT]) < ERROR
    assert relative_error(found[:, :, LATENT:], expected[:, :, LATENT:]) < ERROR


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tokens", [2, 16, 17, 33, 64, 100, 128])
@pytest.mark.parametrize(("heads", "nope"), [(16, NOPE), (20, 192)])
@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_latents_are_written_where_queries_are_absorbed(
    tokens: int, heads: int, nope: int, pool_dtype: torch.dtype
) -> None:
    assert_written_and_absorbed(few_tokens, tokens, heads, (nope, ROPE, LATENT), pool_dtype, torch.device("cuda"))


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("heads", "value"), [(3, VALUE), (HEADS, VALUE), (20, 2 * VALUE)])
def test_latents_are_expanded_and_quantized_as_defined(tokens: int, heads: int, value: int) -> None:
    attended = random(tokens, heads, LATENT)
    weight = random(heads, NOPE + value, LATENT)[:, NOPE:].transpose(1, 2)
    # Rows of a step may begin anywhere.
    found = empty_quantized(5 + tokens, heads * value, device=attended.device)
    few_tokens.expand_values_into(attended, weight, found.rows(5, 5 + tokens))
    expected = quantize(reference.expand_values(attended.float(), weight.float()).flatten(1))
    assert torch.allclose(found.scales[5:], expected.scales, rtol=1e-3)
    assert relative_error(dequantize(found)[5:], dequantize(expected)) < QUANTIZED_ERROR


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tokens", [0, 2, 16, 17, 33, few_tokens.MOST_TOKENS_OF_PLAIN_VALUES])
@pytest.mark.parametrize(("heads", "value"), [(16, VALUE), (20, 2 * VALUE)])
def test_latents_are_expanded_as_defined(tokens: int, heads: int, value: int) -> None:
    attended = random(tokens, heads, LATENT)
    weight = random(heads, NOPE + value, LATENT)[:, NOPE:].transpose(1, 2)
    assert few_tokens.takes_plain_values(attended, weight)
    found = few_tokens.expand_values(attended, weight)
    assert found.shape == (tokens, heads, value) and found.dtype == torch.bfloat16
    assert relative_error(found, reference.expand_values(attended.float(), weight.float())) < ERROR


@pytest.mark.gpu
@on_hopper
def test_other_widths_and_many_tokens_are_not_taken() -> None:
    query, weight = random(4, 2, NOPE + ROPE), random(2, NOPE, LATENT)
    assert few_tokens.takes_queries(query, weight)
    assert not few_tokens.takes_queries(query, weight[:, :64])
    assert not few_tokens.takes_queries(query, weight[:, :, :256])
    few = few_tokens.MOST_TOKENS_OF_OTHERS
    assert [few_tokens.takes_queries(random(few + 1, heads, NOPE + ROPE), weight) for heads in (2, 128)] == [
        False,
        True,
    ]
    assert not few_tokens.takes_queries(random(few_tokens.MOST_TOKENS + 1, 128, NOPE + ROPE), weight)
    assert few_tokens.takes_values(random(4, 2, LATENT), weight.transpose(1, 2))
    assert not few_tokens.takes_values(random(4, 2, LATENT).float(), weight.transpose(1, 2))
    assert not few_tokens.takes_values(random(4, 2, LATENT), random(2, LATENT, VALUE))


def test_the_fewest_tiles_that_hold_all_tokens_share_them_evenly() -> None:
    assert [few_tokens.choose_tiles(tokens, many=True) for tokens in (1, 33, 96, 97, 129, 192)] == [
        (16, 1), (64, 1), (96, 1), (128, 1), (96, 2), (96, 2),
    ]  # fmt: skip
    assert few_tokens.choose_tiles(97, many=False) == (64, 2)
