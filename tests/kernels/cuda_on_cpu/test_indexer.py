"""The indexer's sources on the CPU: keys and queries, scores, and the choice of tokens."""

import pytest
import torch

from kernels.index_keys import pool_shape, read_keys, reference
from kernels.rope import frequencies, rotation_table
from kernels.top_tokens import reference as chosen
from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.index_contexts import index_contexts

TOKENS, E4M3 = 37, torch.float8_e4m3fn


@pytest.mark.parametrize(("pairs", "interleaved"), [(32, False), (4, True), (64, False)])
def test_keys_and_queries_are_rounded_as_defined(pairs: int, interleaved: bool, on_cpu: CudaOnCpu) -> None:
    rows, turns = on_cpu.module("index_keys.rows"), rotation_table(frequencies(2 * pairs, 100.0), TOKENS)
    keys, queries = torch.randn(TOKENS, 704).bfloat16()[:, :128], torch.randn(TOKENS, 3, 128).bfloat16()
    weight, bias, weights = torch.randn(128), torch.randn(128), torch.randn(7, TOKENS, 3)
    slots, (shape, stored) = torch.randperm(128)[:TOKENS], pool_shape(128, E4M3)
    pools = [torch.full((2, *shape), 255, dtype=stored) for _ in range(2)]
    for backend, pool in zip((reference, rows), pools, strict=True):
        backend.write_keys(keys, weight, bias, 1e-6, turns, slots, pool, interleaved)
    defined, found = (read_keys(pool, slots) for pool in pools)
    assert (found - defined).norm() <= 4e-3 * defined.norm()
    wanted, made = (each.make_queries(queries, weights, 0.3, turns, True, interleaved) for each in (reference, rows))
    assert (made.values.float() - wanted.values.float()).norm() <= 4e-3 * wanted.values.float().norm()
    assert torch.allclose(made.weights, wanted.weights, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "query_tokens", "heads"),
    [([1], 1, 32), ([4, 64, 65, 600], 1, 64), ([70, 300, 9], 3, 64), ([150], 41, 32), ([1200, 9], 9, 64)],
)
def test_queries_score_what_they_see(lengths: list[int], query_tokens: int, heads: int, on_cpu: CudaOnCpu) -> None:
    case = index_contexts(lengths, query_tokens, heads, 128, E4M3, torch.device("cpu"))
    scores = torch.full((len(case.queries.values), 64 * case.plan.block_table.shape[1]), float("nan"))
    on_cpu.module("index_scores.warpgroups").index_scores(case.queries, case.pool, case.plan, scores)
    for token, (query, weights) in enumerate(zip(case.queries.values, case.queries.weights, strict=True)):
        keys = case.keys[token // query_tokens]
        seen = len(keys) - query_tokens + token % query_tokens + 1
        expected = weights.double() @ (query.double() @ keys[:seen].double().t()).clamp(min=0)
        assert (scores[token, :seen] - expected).norm() <= 1e-5 * expected.norm()


# By kernel of clusters, with its CTAs; or one CTA's that holds all scores.
@pytest.mark.parametrize("form", [("choose", 1), ("choose", 4), ("choose_long", 3), None])
@pytest.mark.parametrize("kind", ["random", "few values"])
@pytest.mark.parametrize(("width", "count"), [(5003, 2048), (2049, 40)])
def test_the_highest_scores_are_chosen(
    form: tuple[str, int] | None, kind: str, width: int, count: int, on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = on_cpu.module("top_tokens.short_rows" if form is None else "top_tokens.clusters")
    if form is not None:
        # CTAs have more scores than they hold.
        held = f"USUAL_HELD = {module.HELD}, LONG_HELD = {module.LONG_HELD}"
        on_cpu.make_mistake(module.SOURCE, held, "USUAL_HELD = 700, LONG_HELD = 900")
        monkeypatch.setattr(module, "_form", lambda *_: form)
        # Short rows are left to no other kernel.
        monkeypatch.setattr(module, "OF_PROMPT", 0)
        # For the second query no more CTAs choose than three, since clusters take turns.
        monkeypatch.setattr(module, "_at_once", lambda *_: 1)
    scores = torch.randn(3, width) if kind == "random" else torch.randint(-2, 3, (3, width)).float()
    seen = torch.tensor([width, 2047, 2050 - count], dtype=torch.int32)
    # What a query does not see may be anything.
    for row, tokens in zip(scores, seen, strict=True):
        row[tokens:] = float("nan")
    assert torch.equal(module.top_tokens(scores, seen, count), chosen.top_tokens(scores, seen, count))


def test_one_cta_takes_rows_that_see_little(on_cpu: CudaOnCpu) -> None:
    module, count = on_cpu.module("top_tokens.clusters"), 2048
    seen = torch.tensor([8193, 8192, 2049, 2048, 5], dtype=torch.int32)
    scores = torch.randn(len(seen), 8300)
    for row, tokens in zip(scores, seen, strict=True):
        row[tokens:] = float("nan")
    assert torch.equal(module.top_tokens(scores, seen, count), chosen.top_tokens(scores, seen, count))
