"""The indexer's scores: their definition, and Triton's kernel, which is interpreted where there is no GPU."""

from collections.abc import Callable
from importlib import import_module

import pytest
import torch

from kernels.index_keys import IndexQueries
from kernels.index_scores import index_scores, reference
from kernels.index_scores import triton as ours
from kernels.mla_decode import DecodePlan
from tests.support.combinations import crossed
from tests.support.index_contexts import IndexContexts, index_contexts

Scorer = Callable[[IndexQueries, torch.Tensor, DecodePlan, torch.Tensor], None]
E4M3 = torch.float8_e4m3fn


def poisoned_scores(case: IndexContexts, scorer: Scorer) -> torch.Tensor:
    tokens, width = len(case.queries.values), 64 * case.plan.block_table.shape[1]
    out = torch.full((tokens, width), float("nan"), device=case.pool.device)
    scorer(case.queries, case.pool, case.plan, out)
    return out


def assert_scores(case: IndexContexts, found: torch.Tensor, error: float) -> None:
    """Each query's scores of what it sees, in float64; all of it is written, and no poison read."""
    queries = case.plan.query_tokens
    values, weights = case.queries.values.double(), case.queries.weights.double()
    for row, keys in enumerate(case.keys):
        for index in range(queries):
            token, seen = row * queries + index, len(keys) - queries + index + 1
            products = (values[token] @ keys[:seen].double().t()).clamp(min=0)
            expected = weights[token] @ products
            assert (found[token, :seen] - expected).norm() <= error * expected.norm()


@crossed(
    scorer=[reference.index_scores, ours.index_scores],
    lengths__query_tokens=[([1], 1), ([4, 64, 65, 130], 1), ([3, 66, 129], 3), ([70, 21], 21), ([200], 33)],
    dtype=[torch.float32, torch.bfloat16, E4M3],
    heads__width=[(3, 16), (16, 32), (5, 64)],
)
def test_queries_score_exactly_what_they_see(
    scorer: Scorer,
    lengths: list[int],
    query_tokens: int,
    dtype: torch.dtype,
    heads: int,
    width: int,
    device: torch.device,
) -> None:
    case = index_contexts(lengths, query_tokens, heads, width, dtype, device)
    assert_scores(case, poisoned_scores(case, scorer), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, E4M3])
@pytest.mark.parametrize("query_tokens", [1, 20])
def test_the_kernel_agrees_with_the_definition(dtype: torch.dtype, query_tokens: int, device: torch.device) -> None:
    case = index_contexts([20, 100, 129], query_tokens, 6, 32, dtype, device)
    assert_scores(case, poisoned_scores(case, ours.index_scores), 1e-5)
    assert_scores(case, poisoned_scores(case, reference.index_scores), 1e-5)


def test_no_queries_give_no_scores(device: torch.device) -> None:
    case = index_contexts([], 1, 4, 16, torch.float32, device)
    assert index_scores(case.queries, case.pool, case.plan).shape[0] == 0


def test_the_cuda_form_takes_quantized_keys_of_published_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings")
    form = import_module("kernels.index_scores.warpgroups")
    monkeypatch.setattr(form, "is_hopper", lambda _: True)
    shapes = [(64, 128, E4M3), (32, 128, E4M3), (64, 64, E4M3), (48, 128, E4M3), (64, 128, torch.bfloat16)]
    cases = [index_contexts([70], 2, heads, width, dtype, torch.device("cpu")) for heads, width, dtype in shapes]
    assert [form.takes(case.queries, case.pool) for case in cases] == [True, True, False, False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[1, 64, 65, 3500], [32768] * 4, [131072]], ids=["ragged", "even", "long"])
@pytest.mark.parametrize("query_tokens", [1, 2, 4, 301])
@pytest.mark.parametrize("heads", [64, 32])
# The tensor cores' own sums of FP8 products have 14 bits.
@pytest.mark.parametrize(("module", "error"), [("triton", 1e-4), ("warpgroups", 2e-3)], ids=["triton", "cuda"])
def test_scores_at_published_widths(
    lengths: list[int], query_tokens: int, heads: int, module: str, error: float, device: torch.device
) -> None:
    case = index_contexts([length + query_tokens for length in lengths], query_tokens, heads, 128, E4M3, device)
    assert_scores(case, poisoned_scores(case, import_module(f"kernels.index_scores.{module}").index_scores), error)
