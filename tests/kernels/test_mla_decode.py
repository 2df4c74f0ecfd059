import pytest
import torch

from kernels.kv_copy import BLOCK_TOKENS, slot_runs
from kernels.mla_decode import mla_decode, plan_decode

WIDTH, VALUES, HEADS, SCALE = 40, 32, 3, 0.2


def scattered_contexts(lengths: list[int]) -> tuple[torch.Tensor, list[list[slice]], list[torch.Tensor]]:
    """A pool poisoned wherever no context lies, each row's runs, and each row's latents in order."""
    blocks = torch.randperm(sum(-(-length // BLOCK_TOKENS) for length in lengths) + 3).tolist()
    pool = torch.full((len(blocks), BLOCK_TOKENS, WIDTH), float("nan"))
    flat = pool.view(-1, WIDTH)
    runs, contexts = [], []
    for length in lengths:
        own = slot_runs([blocks.pop() for _ in range(-(-length // BLOCK_TOKENS))], length)
        for run in own:
            flat[run] = torch.randn(run.stop - run.start, WIDTH)
        runs.append(own)
        contexts.append(torch.cat([flat[run] for run in own]))
    return pool, runs, contexts


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
    pool, runs, contexts = scattered_contexts(lengths)
    query = torch.randn(len(lengths) * query_tokens, HEADS, WIDTH)
    found = mla_decode(query, pool, plan_decode(runs, query_tokens), value_width=VALUES, scale=SCALE)
    rows = query.view(len(lengths), query_tokens, HEADS, WIDTH)
    expected = torch.cat([expected_row(row, context) for row, context in zip(rows, contexts, strict=True)])
    assert (found.double() - expected).norm() / expected.norm() < 1e-6


def test_bfloat16_stays_near_float32() -> None:
    pool, runs, _ = scattered_contexts([200])
    query = torch.randn(1, HEADS, WIDTH)
    exact = mla_decode(query, pool, plan_decode(runs), value_width=VALUES, scale=SCALE)
    found = mla_decode(query.bfloat16(), pool.bfloat16(), plan_decode(runs), value_width=VALUES, scale=SCALE)
    assert found.dtype == torch.bfloat16 and (found.float() - exact).norm() / exact.norm() < 0.03


def test_a_compressed_pool_is_attended_to_as_what_it_holds() -> None:
    pool, runs, _ = scattered_contexts([200, 65])
    query = torch.randn(2, HEADS, WIDTH)
    compressed = pool.to(torch.float8_e4m3fn)
    found = mla_decode(query, compressed, plan_decode(runs), value_width=VALUES, scale=SCALE)
    expected = mla_decode(query, compressed.float(), plan_decode(runs), value_width=VALUES, scale=SCALE)
    assert torch.equal(found, expected)


def test_no_rows_give_no_rows() -> None:
    pool = torch.zeros(1, BLOCK_TOKENS, WIDTH)
    found = mla_decode(torch.empty(0, HEADS, WIDTH), pool, plan_decode([]), value_width=VALUES, scale=SCALE)
    assert found.shape == (0, HEADS, VALUES)
