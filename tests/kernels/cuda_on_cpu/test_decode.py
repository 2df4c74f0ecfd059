"""Decode attention over an e4m3 pool on the CPU, and the products around it, by the sources that compute it."""

import pytest
import torch

from kernels.act_quant import dequantize, empty_quantized
from kernels.act_quant.reference import quantize
from kernels.mla_decode import plan_decode
from kernels.mla_decode import reference as attention
from kernels.mla_projections import reference
from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.errors import relative_error
from tests.support.latents import scattered_contexts

NOPE, ROPE, LATENT, WIDTH = 128, 64, 512, 576
SCALE, KV_SCALE = 0.12, 0.5


def random_queries(tokens: int, heads: int, nope: int = NOPE) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, weights that absorb them, and rotations. A query's magnitude depends on its token and head."""
    magnitudes = torch.rand(tokens, heads, 1) + 0.5
    query = (torch.randn(tokens, heads, nope + ROPE) * magnitudes).bfloat16()
    weight = (torch.randn(heads, nope, LATENT) / nope**0.5).bfloat16()
    return query, weight, torch.polar(torch.ones(tokens, ROPE // 2), torch.rand(tokens, ROPE // 2) * 6)


@pytest.fixture(autouse=True)
def _few_heads_have_the_tiles_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.mla_projections.few_tokens.MANY_HEADS", 1)


@pytest.mark.parametrize(("tokens", "heads", "nope"), [(1, 3, 192), (33, 2, NOPE), (97, 1, NOPE), (130, 1, 192)])
def test_queries_are_absorbed(tokens: int, heads: int, nope: int, on_cpu: CudaOnCpu) -> None:
    query, weight, rotations = random_queries(tokens, heads, nope)
    found = on_cpu.module("mla_projections.few_tokens").absorb_query(query, weight, rotations)
    assert relative_error(found, reference.absorb_query(query.float(), weight.float(), rotations)) < 5e-3


@pytest.mark.parametrize(("tokens", "heads"), [(33, 2), (97, 1), (130, 1)])
def test_latents_are_expanded_and_quantized(tokens: int, heads: int, on_cpu: CudaOnCpu) -> None:
    attended = torch.randn(tokens, heads, LATENT).bfloat16()
    weight = (torch.randn(heads, NOPE, LATENT) / LATENT**0.5).bfloat16().transpose(1, 2)
    # Rows of a step may begin anywhere.
    found = empty_quantized(5 + tokens, heads * NOPE, device=attended.device)
    on_cpu.module("mla_projections.few_tokens").expand_values_into(attended, weight, found.rows(5, 5 + tokens))
    expected = quantize(reference.expand_values(attended.float(), weight.float()).flatten(1))
    assert relative_error(dequantize(found)[5:], dequantize(expected)) < 0.03


def test_latents_are_expanded(on_cpu: CudaOnCpu) -> None:
    attended = torch.randn(50, 3, LATENT).bfloat16()
    weight = (torch.randn(3, 2 * NOPE, LATENT) / LATENT**0.5).bfloat16().transpose(1, 2)
    found = on_cpu.module("mla_projections.few_tokens").expand_values(attended, weight)
    assert relative_error(found, reference.expand_values(attended.float(), weight.float())) < 5e-3


@pytest.mark.parametrize(
    ("lengths", "query_tokens", "heads"),
    [([200, 65, 640], 1, 64), ([300, 1, 70], 1, 128), ([3, 70], 2, 20)],
    ids=["one row tile", "two row tiles", "two queries of few heads"],
)
def test_queries_attend_to_their_contexts(lengths: list[int], query_tokens: int, heads: int, on_cpu: CudaOnCpu) -> None:
    stored = scattered_contexts([length + query_tokens - 1 for length in lengths], WIDTH)
    pool = (stored.pool / KV_SCALE).to(torch.float8_e4m3fn)
    query, weight, rotations = random_queries(len(lengths) * query_tokens, heads)
    absorbed = on_cpu.module("mla_projections.few_tokens").absorb_query(query, weight, rotations)
    plan = plan_decode(stored.block_table, stored.lengths, query_tokens)
    found = on_cpu.module("mla_decode.fp8").attend(absorbed, pool, plan, SCALE, KV_SCALE).joined()
    exact = reference.absorb_query(query.float(), weight.float(), rotations)
    expected = attention.mla_decode(exact, pool.float() * KV_SCALE, plan, LATENT, SCALE, 1.0)
    assert relative_error(found, expected) < 0.08
