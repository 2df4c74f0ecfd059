import pytest
import torch

from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode import mla_decode, plan_decode
from tests.support.latents import scattered_contexts

WIDTH, VALUES, HEADS, SCALE = 40, 32, 3, 0.2


def expected_row(query: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """query: [query_tokens, heads, width], the context's last; in float64, one query at a time."""
    rows = []
    for index, heads in enumerate(query.double()):
        seen = context[: len(context) - len(query) + 1 + index].double()
        rows.append(torch.softmax(heads @ seen.t() * SCALE, dim=1) @ seen[:, :VALUES])
    return torch.stack(rows)


@pytest.mark.parametrize("lengths", [[1], [64], [65], [5, 64, 200, 129]])
@pytest.mark.parametrize("query_tokens", [1, 4])
def test_ragged_rows_attend_to_exactly_their_context(lengths: list[int], query_tokens: int) -> None:
    lengths = [length + query_tokens - 1 for length in lengths]
    stored = scattered_contexts(lengths, WIDTH)
    query = torch.randn(len(lengths) * query_tokens, HEADS, WIDTH)
    plan = plan_decode(stored.block_table, stored.lengths, query_tokens)
    found = mla_decode(query, stored.pool, plan, value_width=VALUES, scale=SCALE).joined()
    rows = query.view(len(lengths), query_tokens, HEADS, WIDTH)
    expected = torch.cat([expected_row(row, context) for row, context in zip(rows, stored.contexts, strict=True)])
    assert (found.double() - expected).norm() / expected.norm() < 1e-6


def test_bfloat16_stays_near_float32() -> None:
    stored = scattered_contexts([200], WIDTH)
    plan = plan_decode(stored.block_table, stored.lengths)
    query = torch.randn(1, HEADS, WIDTH)
    exact = mla_decode(query, stored.pool, plan, value_width=VALUES, scale=SCALE).joined()
    found = mla_decode(query.bfloat16(), stored.pool.bfloat16(), plan, value_width=VALUES, scale=SCALE).joined()
    assert found.dtype == torch.bfloat16 and (found.float() - exact).norm() / exact.norm() < 0.03


def test_a_compressed_pools_latents_are_its_values_times_the_scale() -> None:
    stored = scattered_contexts([200, 65], WIDTH)
    plan = plan_decode(stored.block_table, stored.lengths)
    query = torch.randn(2, HEADS, WIDTH)
    compressed = stored.pool.to(torch.float8_e4m3fn)
    found = mla_decode(query, compressed, plan, value_width=VALUES, scale=SCALE, kv_scale=0.5).joined()
    expected = mla_decode(query, compressed.float() * 0.5, plan, value_width=VALUES, scale=SCALE).joined()
    assert torch.allclose(found, expected, atol=1e-6)


def test_no_rows_give_no_rows() -> None:
    plan = plan_decode(torch.empty(0, 0, dtype=torch.int32), torch.empty(0, dtype=torch.int32))
    pool = torch.zeros(1, BLOCK_TOKENS, WIDTH)
    found = mla_decode(torch.empty(0, HEADS, WIDTH), pool, plan, value_width=VALUES, scale=SCALE).joined()
    assert found.shape == (0, HEADS, VALUES)
