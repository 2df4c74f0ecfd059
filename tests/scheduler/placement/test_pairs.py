"""Placement on a prefill and a decode worker together."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.costs import CostModel
from mesh.domain.targets import StoreTarget
from mesh.errors import NamespaceMismatch, NoWorker, Overloaded
from scheduler.config import ObjectivesConfig
from scheduler.placement.candidates import Candidates, CandidateWorker, PlacementRequest, Unreported
from scheduler.placement.choose import admit, explain, refusal
from scheduler.placement.placed_work import placed_work
from scheduler.placement.predict import predict
from scheduler.placement.terms import Rejection, Terms
from tests.support.scheduling import NAMESPACE, changed, choose, make_candidate, make_constants, make_load, make_request

CONSTANTS = make_constants(queue_requests=4)
OTHER = msgspec.structs.replace(NAMESPACE, dtype="float8_e4m3fn")


def make_prefill(worker_id: str = "p", **changes: Any) -> CandidateWorker:
    return make_candidate(worker_id, **changes)


def chosen_of(candidates: Candidates, request: PlacementRequest | None = None) -> Terms:
    chosen = choose(predict(request or make_request(), candidates, CONSTANTS))
    assert chosen is not None
    return chosen


def pair_of(candidates: Candidates, request: PlacementRequest | None = None) -> tuple[str, str | None]:
    chosen = chosen_of(candidates, request)
    return chosen.worker_id, chosen.prefill_worker_id


def test_a_long_prompt_is_computed_by_the_prefill_worker() -> None:
    assert pair_of(Candidates([make_candidate("d")], [make_prefill()])) == ("d", "p")


def test_a_short_prompt_stays_on_a_busy_decode_worker() -> None:
    busy = make_candidate("d", load=make_load(running_requests=7))
    assert pair_of(Candidates([busy], [make_prefill()]), make_request(prompt_tokens=60)) == ("d", None)


def test_a_short_prompt_stays_on_a_slow_decode_worker() -> None:
    slow = make_candidate("d", load=make_load(running_requests=7, prefill_tokens_per_second=50.0))
    assert pair_of(Candidates([slow], [make_prefill()]), make_request(prompt_tokens=60)) == ("d", None)


def test_a_worker_without_measurements_is_as_quick_as_others() -> None:
    # The constant that stands in is five times what the prefill worker measured.
    unmeasured = make_candidate("d", load=make_load(prefill_tokens_per_second=None))
    assert pair_of(Candidates([unmeasured], [make_prefill()])) == ("d", "p")


def test_a_long_prompt_stays_where_little_of_it_lacks() -> None:
    assert pair_of(Candidates([make_candidate("d", cached_blocks=9)], [make_prefill()])) == ("d", None)


def test_a_prompt_delays_fewest_requests_when_prefill_is_busy() -> None:
    # 640 tokens take 0.64 s anywhere; on the decode worker each of its requests loses 0.576 s.
    busy = make_prefill(load=make_load(queued_prefill_tokens=2000))
    idle, full = (make_candidate("d", load=make_load(running_requests=count)) for count in (0, 7))
    assert pair_of(Candidates([idle], [busy])) == ("d", None)
    assert pair_of(Candidates([full], [busy])) == ("d", "p")


def test_a_prompt_delays_the_requests_of_other_ranks_too() -> None:
    busy = make_prefill(load=make_load(queued_prefill_tokens=2000))
    assert pair_of(Candidates([make_candidate("d", rank=0, others_requests=7)], [busy])) == ("d", "p")


def test_what_decodes_elsewhere_is_not_delayed_by_a_prompt() -> None:
    candidates = [make_candidate("a", load=make_load(running_requests=7)), make_candidate("b")]
    assert pair_of(Candidates(candidates, [make_prefill(unusable="it is draining")])) == ("b", None)


def test_without_prefill_workers_nobody_is_charged_for_delaying_others() -> None:
    alone = predict(make_request(), Candidates([make_candidate("d", load=make_load(running_requests=7))]), CONSTANTS)[0]
    assert alone.total_ms == alone.ttft_ms + 100 * alone.tpot_ms


def test_a_pair_waits_twice_for_half_a_step() -> None:
    idle, busy = (make_candidate("d", load=make_load(each, decode_step_requests=1)) for each in (0, 1))
    steady = make_constants(costs=CostModel(decode_steps=((1.0, 20.0),)))
    alone, loaded = (predict(make_request(), Candidates([each], [make_prefill()]), steady)[1] for each in (idle, busy))
    # A step takes 10 ms.
    assert loaded.ttft_ms - alone.ttft_ms == pytest.approx(5)
    assert loaded.total_ms - alone.total_ms == pytest.approx(5 + 5)


def test_a_first_token_does_not_wait_for_the_push() -> None:
    pairs = [
        predict(make_request(), Candidates([make_candidate("d", block_bytes=size)], [make_prefill()]), CONSTANTS)[1]
        for size in (1, 10**8)
    ]
    # 640 tokens at 1000 a second, and half of the handover's 5 ms.
    assert [pair.ttft_ms for pair in pairs] == pytest.approx([642.5, 642.5])
    # Ten blocks of 100 MB at 2 GB/s.
    assert pairs[1].total_ms - pairs[0].total_ms == pytest.approx(500)


def test_a_prefill_worker_computes_even_short_prompts_if_need_be() -> None:
    decode = make_candidate("d", can_prefill=False)
    assert pair_of(Candidates([decode], [make_prefill()]), make_request(prompt_tokens=10)) == ("d", "p")


def test_a_decode_worker_that_receives_no_kv_computes_prompts() -> None:
    candidates = [make_candidate("a", receives_kv=False)]
    assert pair_of(Candidates(candidates, [make_prefill()])) == ("a", None)


def test_the_prefill_worker_with_the_cached_prefix_is_taken() -> None:
    prefills = [make_prefill("p0"), make_prefill("p1", cached_blocks=6), make_prefill("p2", cached_blocks=2)]
    chosen = chosen_of(Candidates([make_candidate("d")], prefills))
    assert (chosen.prefill_worker_id, chosen.cached_blocks, chosen.uncached_tokens) == ("p1", 6, 256)


def test_a_prefill_queue_longer_than_the_cached_prefix_outweighs_it() -> None:
    cached = make_prefill("p1", cached_blocks=6, load=make_load(queued_prefill_tokens=6 * 64 + 1))
    assert pair_of(Candidates([make_candidate("d")], [make_prefill("p0"), cached])) == ("d", "p0")


def test_work_placed_and_not_reported_counts_as_queued() -> None:
    given_work = make_prefill("p0", unreported=Unreported(1, 640, 11))
    assert pair_of(Candidates([make_candidate("d")], [given_work, make_prefill("p1")])) == ("d", "p1")


def test_blocks_that_the_decode_worker_holds_are_not_moved() -> None:
    decodes = [make_candidate("d0"), make_candidate("d1", cached_blocks=4)]
    request = make_request(prompt_tokens=6400, max_tokens=64)
    decodes = [changed(each, context_tokens=10_000, block_bytes=100_000_000) for each in decodes]
    prefill = make_prefill(context_tokens=10_000, load=make_load(prefill_tokens_per_second=1e6))
    terms = predict(request, Candidates(decodes, [prefill]), CONSTANTS)
    pushed = {term.worker_id: term for term in terms if term.prefill_worker_id}
    # Four blocks of 100 MB at 2 GB/s.
    assert round(pushed["d0"].total_ms - pushed["d1"].total_ms) == 200
    assert pair_of(Candidates(decodes, [prefill]), request) == ("d1", "p")


def test_blocks_in_host_memory_are_read_and_not_moved() -> None:
    decodes = [make_candidate("d0"), make_candidate("d1", cached_blocks=1, host_blocks=3)]
    request = make_request(prompt_tokens=6400, max_tokens=64)
    decodes = [changed(each, context_tokens=10_000, block_bytes=100_000_000) for each in decodes]
    prefill = make_prefill(context_tokens=10_000, load=make_load(prefill_tokens_per_second=1e6))
    terms = predict(request, Candidates(decodes, [prefill]), CONSTANTS)
    pushed = {term.worker_id: term for term in terms if term.prefill_worker_id}
    # Four blocks of 100 MB at 2 GB/s, in place of three at 5 GB/s.
    assert round(pushed["d0"].total_ms - pushed["d1"].total_ms) == 200 - 60
    assert "3 blocks in the host memory of d1, 96 blocks to move" in explain(request, pushed["d1"], 2)


def test_a_push_takes_as_long_as_the_prefill_worker_measured() -> None:
    def total_ms(prefill: CandidateWorker) -> float:
        return predict(make_request(), Candidates([make_candidate("d")], [prefill]), CONSTANTS)[1].total_ms

    measured = make_prefill(load=make_load(push_bytes_per_second=1e8))
    # 10 MB at 100 MB/s, in place of 2 GB/s.
    assert total_ms(measured) - total_ms(make_prefill()) == pytest.approx(95)


def test_a_layerwise_push_hides_behind_the_computation() -> None:
    total = layerwise_total(6400, 6400)
    # 100 MB at 2 GB/s are 50 ms.
    assert round(layerwise_total(6401, 6401) - total) == 45


def test_a_push_is_layerwise_where_both_workers_say_so() -> None:
    assert layerwise_total(6400, 64) == layerwise_total(64, 6400) == layerwise_total(64, 64)
    assert layerwise_total(6400, 6401) == layerwise_total(6401, 6400) == layerwise_total(6401, 6401)


def layerwise_total(decode_tokens: int, prefill_tokens: int) -> float:
    """Total time of a prompt of 6400 tokens on a pair whose workers push layer by layer from these lengths on."""
    decode = make_candidate("d", context_tokens=10_000, layerwise_tokens=decode_tokens)
    prefill = make_prefill(context_tokens=10_000, layerwise_tokens=prefill_tokens)
    request, constants = make_request(prompt_tokens=6400), make_constants(layerwise_rest=0.1)
    return predict(request, Candidates([decode], [prefill]), constants)[1].total_ms


def test_workers_of_two_namespaces_are_never_paired() -> None:
    decodes = [make_candidate("d0"), make_candidate("d1", kv_namespace=OTHER, load=make_load(running_requests=3))]
    assert pair_of(Candidates(decodes, [make_prefill(kv_namespace=OTHER)])) == ("d1", "p")
    paired = {
        (term.worker_id, term.prefill_worker_id)
        for term in predict(make_request(), Candidates(decodes, [make_prefill(kv_namespace=OTHER)]), CONSTANTS)
    }
    assert ("d0", "p") not in paired


def test_workers_with_and_without_drafts_are_paired_either_way() -> None:
    drafting = msgspec.structs.replace(NAMESPACE, layers=NAMESPACE.layers + 1, draft_layers=1)
    for ours, theirs in ((NAMESPACE, drafting), (drafting, NAMESPACE)):
        decode = make_candidate("d", can_prefill=False, kv_namespace=ours)
        assert pair_of(Candidates([decode], [make_prefill(kv_namespace=theirs)])) == ("d", "p")


def test_a_prefill_worker_with_the_same_drafts_is_preferred() -> None:
    drafting = msgspec.structs.replace(NAMESPACE, layers=NAMESPACE.layers + 1, draft_layers=1)
    prefills = [make_prefill("a"), make_prefill("b", kv_namespace=drafting)]
    decode = make_candidate("d", can_prefill=False, kv_namespace=drafting)
    assert pair_of(Candidates([decode], prefills)) == ("d", "b")
    busy = [prefills[0], make_prefill("b", kv_namespace=drafting, load=make_load(queued_prefill_tokens=5000))]
    assert pair_of(Candidates([decode], busy)) == ("d", "a")


def test_other_layers_than_those_of_drafts_are_never_missing() -> None:
    fewer = msgspec.structs.replace(NAMESPACE, draft_layers=1)
    decode = make_candidate("d", can_prefill=False)
    terms = predict(make_request(), Candidates([decode], [make_prefill(kv_namespace=fewer)]), CONSTANTS)
    assert isinstance(refusal("oracle", terms, ObjectivesConfig()), NamespaceMismatch)


def test_a_mesh_in_which_no_pair_fits_says_what_differs() -> None:
    candidates = Candidates([make_candidate("d", can_prefill=False)], [make_prefill(kv_namespace=OTHER)])
    terms = predict(make_request(), candidates, CONSTANTS)
    error = refusal("oracle", terms, ObjectivesConfig())
    assert isinstance(error, NamespaceMismatch)
    assert "dtype oracle against float8_e4m3fn" in error.message
    assert "same checkpoint and KV dtype" in error.message


def test_a_decode_worker_waits_for_a_prefill_worker() -> None:
    terms = predict(make_request(), Candidates([make_candidate("d", can_prefill=False)]), CONSTANTS)
    assert [term.rejection for term in terms] == [Rejection.UNUSABLE]
    assert isinstance(refusal("oracle", terms, ObjectivesConfig()), NoWorker)


def test_an_avoided_or_full_prefill_worker_gives_way() -> None:
    decode, full = make_candidate("d"), make_prefill("p1", load=make_load(waiting_requests=12))
    avoided = make_request(avoid=frozenset({"p0"}))
    assert pair_of(Candidates([decode], [make_prefill("p0"), full]), avoided) == ("d", None)
    assert pair_of(Candidates([decode], [make_prefill("p0"), full, make_prefill("p2")]), avoided) == ("d", "p2")


def test_a_mesh_whose_prefill_workers_are_full_is_full() -> None:
    full = make_prefill(load=make_load(waiting_requests=12, queued_prefill_tokens=1500))
    terms = predict(make_request(), Candidates([make_candidate("d", can_prefill=False)], [full]), CONSTANTS)
    assert [term.rejection for term in terms] == [Rejection.FULL]
    error = refusal("oracle", terms, ObjectivesConfig())
    assert isinstance(error, Overloaded)
    # Until the queue of 1500 tokens is computed.
    assert error.retry_after_ms == 1500


def test_a_prompt_must_fit_a_prefill_workers_pool() -> None:
    small = make_prefill("p0", total_blocks=10)
    assert pair_of(Candidates([make_candidate("d")], [small])) == ("d", None)
    assert pair_of(Candidates([make_candidate("d")], [small, make_prefill("p1", total_blocks=11)])) == ("d", "p1")


def test_a_pair_whose_status_broke_is_chosen_last() -> None:
    prefill = make_prefill(connected=False)
    assert pair_of(Candidates([make_candidate("d")], [prefill])) == ("d", None)
    assert pair_of(Candidates([make_candidate("d", can_prefill=False)], [prefill])) == ("d", "p")


def test_a_pair_predicted_over_the_objective_is_refused() -> None:
    objectives = ObjectivesConfig(ttft_ms=500.0)
    candidates = Candidates([make_candidate("d", can_prefill=False)], [make_prefill()])
    terms = admit(predict(make_request(), candidates, CONSTANTS), objectives)
    assert choose(terms) is None
    assert isinstance(refusal("oracle", terms, objectives), Overloaded)
    assert choose(admit(predict(make_request(), candidates, CONSTANTS), ObjectivesConfig(ttft_ms=700.0))) is not None


def test_both_workers_of_a_pair_carry_their_part() -> None:
    candidates = Candidates([make_candidate("d", cached_blocks=2)], [make_prefill()])
    work = placed_work(make_request(), chosen_of(candidates), 0.0, CONSTANTS)
    loads = {name: each.load for name, each in work.items()}
    assert loads == {("d", 0): Unreported(1, 0, 9), ("p", 0): Unreported(1, 640, 11)}


def test_a_prompt_is_sent_after_the_decode_workers_step() -> None:
    running = make_load(running_requests=1, decode_step_ms=80.0)
    decode = make_candidate("d", load=running, can_prefill=False, step_began=9.98)
    chosen = chosen_of(Candidates([decode], [make_prefill()], now=10.0))
    work = placed_work(make_request(), chosen, 10.0, CONSTANTS)["p", 0]
    assert work.prompt_seconds == pytest.approx(chosen.prompt_ms / 1000)
    assert work.comes_at == pytest.approx(10.06)


def test_the_prefill_worker_computes_others_while_a_prompt_waits() -> None:
    decode = make_candidate("d", load=make_load(running_requests=1, decode_step_ms=80.0), can_prefill=False)

    def first_token_ms(prompts_ms: float) -> float:
        prefill = make_prefill(prompts_until=10.0 + prompts_ms / 1000)
        return chosen_of(Candidates([msgspec.structs.replace(decode, step_began=9.98)], [prefill], now=10.0)).ttft_ms

    assert first_token_ms(50.0) == pytest.approx(first_token_ms(0.0))
    assert first_token_ms(100.0) == pytest.approx(first_token_ms(0.0) + 40.0, rel=1e-2)


def test_the_reason_names_both_workers_and_the_store() -> None:
    decode = make_candidate("d", cached_blocks=1, can_prefill=False)
    candidates = Candidates([decode], [make_prefill()], {NAMESPACE: StoreTarget("s", 8)})
    terms = predict(make_request(), candidates, CONSTANTS)
    chosen = choose(terms)
    assert chosen is not None
    reason = explain(make_request(), chosen, len(terms))
    assert reason.startswith("p -> d: first token in")
    assert "128 prompt tokens to compute, 8 blocks cached, s asked for 8, 9 blocks to move" in reason


workers = st.builds(
    make_candidate,
    worker_id=st.uuids().map(str),
    unusable=st.sampled_from([None, "it is draining"]),
    connected=st.booleans(),
    can_prefill=st.booleans(),
    cached_blocks=st.integers(0, 12),
    kv_namespace=st.sampled_from([NAMESPACE, OTHER]),
    load=st.builds(
        make_load,
        running_requests=st.integers(0, 9),
        waiting_requests=st.integers(0, 9),
        queued_prefill_tokens=st.integers(0, 5000),
    ),
)


@given(st.lists(workers, max_size=4), st.lists(workers, max_size=4))
def test_no_other_prefill_worker_would_have_been_better(
    decodes: list[CandidateWorker], prefills: list[CandidateWorker]
) -> None:
    chosen = choose(predict(make_request(), Candidates(decodes, prefills), CONSTANTS))
    every_pair = [
        term
        for decode in decodes
        for prefill in prefills
        for term in predict(make_request(), Candidates([decode], [prefill]), CONSTANTS)
    ]
    best = choose(every_pair) if prefills else chosen
    assert (chosen is None) == (best is None)
    if chosen is not None and best is not None:
        if best.wait_ms == 0.0:
            # Any of the pairs that are as good may be chosen.
            assert chosen.preference()[:-2] == best.preference()[:-2]
        else:
            # While the decode worker makes it wait, the queue of a prefill worker costs nothing: see `best_offers`.
            assert chosen.preference()[:2] == best.preference()[:2]
            assert best.total_ms <= chosen.total_ms <= best.total_ms + best.wait_ms + 1e-9


def test_terms_grow_with_workers_and_not_with_pairs() -> None:
    decodes = [make_candidate(f"d{number}") for number in range(64)]
    prefills = [make_prefill(f"p{number}", cached_blocks=number % 10) for number in range(64)]
    assert len(predict(make_request(), Candidates(decodes, prefills), CONSTANTS)) == 2 * 64
