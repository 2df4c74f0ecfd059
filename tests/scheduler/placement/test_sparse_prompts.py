"""What placement expects of prompts whose attention is sparse, on workers that compute them so and on others."""

from typing import Any

import pytest

from mesh.costs import CostModel
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.domain.targets import StoreTarget
from mesh.domain.workers import PromptPace, TransferCounters, WorkerLoad
from scheduler.placement.candidates import Candidates, CandidateWorker, MeasurementTimes
from scheduler.placement.choose import explain
from scheduler.placement.predict import predict
from scheduler.placement.terms import Terms
from tests.support.scheduling import choose, make_candidate, make_constants, make_load, make_request

FROM_TOKENS, LONG = 16_384, 100_000
COSTS = CostModel(prefill_tokens_per_second=10_000.0, prefill_pairs_ms=8.0, sparse_pairs_ms=0.8)
EXACT_MS = COSTS.prefill_ms(LONG)
SPARSE_MS = COSTS.prefill_ms(FROM_TOKENS) + COSTS.sparse_prefill_ms(LONG - FROM_TOKENS, FROM_TOKENS)
SHORT_PROMPTS = PromptPace(1000 / COSTS.prompt_token_ms(1000), 1000.0)
LONG_PROMPTS = PromptPace(1000 / COSTS.prompt_token_ms(50_000, sparse=True), 50_000.0)


def load_with(exact: PromptPace | None, sparse: PromptPace | None, queued: int = 0) -> WorkerLoad:
    return make_load(
        prefill_tokens_per_second=5000.0, exact_prompts=exact, sparse_prompts=sparse, queued_prefill_tokens=queued
    )


def prefill_worker(name: str, sparse: bool, load: WorkerLoad, **changes: Any) -> CandidateWorker:
    room = {"context_tokens": 131_072, "total_blocks": 4000, "max_requests": 64}
    return make_candidate(
        name, load=load, sparse_prefill=SparsePrefill(FROM_TOKENS, 0.9) if sparse else None, **{**room, **changes}
    )


def predicted(
    workers: list[CandidateWorker], sparse_from: int | None, costs: CostModel = COSTS, **changes: Any
) -> dict[str, Terms]:
    """The terms of a long prompt, by the worker that computes it."""
    request = make_request(
        prompt_tokens=LONG, sparse=None if sparse_from is None else SparsePrefill(sparse_from, recall=0.9)
    )
    return {terms.worker_id: terms for terms in predict(request, Candidates(workers, **changes), make_constants(costs))}


def best(workers: list[CandidateWorker], sparse_from: int | None, costs: CostModel = COSTS) -> Terms:
    chosen = choose(predicted(workers, sparse_from, costs).values())
    assert chosen is not None
    return chosen


def test_a_busy_sparse_worker_may_beat_an_idle_exact_one() -> None:
    busy = load_with(SHORT_PROMPTS, LONG_PROMPTS, queued=100_000)
    workers = [
        prefill_worker("exact", False, load_with(SHORT_PROMPTS, None)),
        prefill_worker("sparse", True, busy, prompts_until=20.0),
    ]
    assert best(workers, FROM_TOKENS).worker_id == "sparse"
    assert best(workers, None).worker_id == "exact"


def test_a_prompt_is_predicted_by_the_pace_of_its_kind() -> None:
    workers = [
        prefill_worker("exact", False, load_with(SHORT_PROMPTS, None)),
        prefill_worker("sparse", True, load_with(SHORT_PROMPTS, LONG_PROMPTS)),
    ]
    asked, refused = predicted(workers, FROM_TOKENS), predicted(workers, None)
    assert asked["sparse"].prompt_ms == pytest.approx(SPARSE_MS)
    # It computes exactly what it is asked to compute sparsely.
    assert asked["exact"].prompt_ms == pytest.approx(EXACT_MS)
    assert [refused[name].prompt_ms for name in ("exact", "sparse")] == pytest.approx([EXACT_MS, EXACT_MS])
    assert (asked["sparse"].sparse_tokens, refused["sparse"].sparse_tokens) == (LONG - FROM_TOKENS, 0)


def test_a_decision_says_how_many_tokens_are_sparse() -> None:
    terms = predicted([prefill_worker("a", True, load_with(None, None))], FROM_TOKENS)
    assert "(100000 prompt tokens to compute, 83616 of them sparsely" in explain(make_request(), terms["a"], 1)


def test_measured_paces_stretch_the_cost_model_of_each_kind() -> None:
    slow = PromptPace(SHORT_PROMPTS.tokens_per_second / 2, SHORT_PROMPTS.context_tokens)
    slower = PromptPace(LONG_PROMPTS.tokens_per_second / 3, LONG_PROMPTS.context_tokens)
    worker = prefill_worker("a", True, load_with(slow, slower))
    sparse_ms = COSTS.sparse_prefill_ms(LONG - FROM_TOKENS, FROM_TOKENS)
    expected = 2 * COSTS.prefill_ms(FROM_TOKENS) + 3 * sparse_ms
    assert predicted([worker], FROM_TOKENS)["a"].prompt_ms == pytest.approx(expected)
    assert predicted([worker], None)["a"].prompt_ms == pytest.approx(2 * EXACT_MS)


def test_without_a_calibrated_cost_model_the_measured_rates_hold() -> None:
    load = load_with(PromptPace(2000.0, 50_000.0), PromptPace(6500.0, 60_000.0))
    worker = prefill_worker("a", True, load)
    expected = FROM_TOKENS / 2.0 + (LONG - FROM_TOKENS) / 6.5
    assert predicted([worker], FROM_TOKENS, CostModel())["a"].prompt_ms == pytest.approx(expected)
    assert predicted([worker], None, CostModel())["a"].prompt_ms == pytest.approx(LONG / 2.0)


def test_a_worker_without_sparse_prompts_gains_what_others_do() -> None:
    fast, slow = PromptPace(8000.0), PromptPace(4000.0)
    known = prefill_worker("known", True, load_with(fast, PromptPace(16_000.0)))
    fresh = prefill_worker("fresh", True, load_with(slow, None))
    terms = predicted([known, fresh], FROM_TOKENS, CostModel())
    expected = FROM_TOKENS / 4.0 + (LONG - FROM_TOKENS) / 8.0
    assert terms["fresh"].prompt_ms == pytest.approx(expected, rel=1e-3)


def test_a_worker_with_only_sparse_prompts_has_one_pace() -> None:
    worker = prefill_worker("a", True, load_with(None, PromptPace(2500.0)))
    for sparse_from in (0, None):
        assert predicted([worker], sparse_from, CostModel())["a"].prompt_ms == pytest.approx(LONG / 2.5)


def test_an_old_gain_gives_way_to_what_the_others_find() -> None:
    found = load_with(PromptPace(5000.0), PromptPace(10_000.0))
    once = load_with(PromptPace(5000.0), PromptPace(1000.0))
    workers = [
        prefill_worker("fresh", True, found),
        prefill_worker("once", True, once, measured_at=MeasurementTimes(sparse=-60.0)),
    ]
    terms = predicted(workers, FROM_TOKENS, CostModel())
    assert terms["once"].prompt_ms == pytest.approx(terms["fresh"].prompt_ms, rel=0.01)


def test_what_a_store_holds_is_compared_with_computing_it_sparsely() -> None:
    """Fetching 1,000 blocks of 1 MB at 100 MB/s takes 10 s: less than to compute them exactly, more than sparsely."""
    worker = prefill_worker(
        "a",
        True,
        load_with(PromptPace(2000.0), PromptPace(50_000.0)),
        transfers=TransferCounters(fetch_bytes_per_second=1e8),
    )
    stores = {worker.identity.kv_namespace: StoreTarget("store", 1000)}
    assert predicted([worker], 0, CostModel(), stores=stores)["a"].store is None
    assert predicted([worker], None, CostModel(), stores=stores)["a"].store is not None
