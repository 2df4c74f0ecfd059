from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.costs import CostModel
from scheduler.placement.candidates import Candidates, CandidateWorker, PlacementRequest
from scheduler.placement.choose import explain
from scheduler.placement.constants import Constants
from scheduler.placement.placed_work import placed_work
from scheduler.placement.predict import predict
from scheduler.placement.terms import Rejection, Terms
from tests.support.scheduling import choose, make_candidate, make_constants, make_load, make_request, predict_alone

CONSTANTS = make_constants(queue_requests=4)
# Steps take as long with many requests as with one.
STEADY = CostModel(decode_steps=((1.0, 20.0),))


def place(request: PlacementRequest, candidates: list[CandidateWorker]) -> Terms | None:
    return choose(predict_alone(request, candidates, CONSTANTS))


def chosen_of(request: PlacementRequest, candidates: list[CandidateWorker]) -> str:
    chosen = place(request, candidates)
    assert chosen is not None
    return chosen.worker_id


def spread(
    request: PlacementRequest, candidates: list[CandidateWorker], count: int, constants: Constants
) -> Counter[str]:
    """How many of `count` placements each worker gets with no status in between."""
    by_id = {candidate.identity.worker_id: candidate for candidate in candidates}
    counts: Counter[str] = Counter()
    for _ in range(count):
        chosen = choose(predict_alone(request, by_id.values(), constants))
        assert chosen is not None
        counts[chosen.worker_id] += 1
        taken = by_id[chosen.worker_id]
        by_id[chosen.worker_id] = msgspec.structs.replace(
            taken, unreported=taken.unreported + placed_work(request, chosen, 0.0, constants)[chosen.worker_id, 0].load
        )
    return counts


def test_the_worker_with_the_cached_prefix_wins_among_idle_ones() -> None:
    candidates = [make_candidate("a"), make_candidate("b", cached_blocks=8), make_candidate("c", cached_blocks=3)]
    assert chosen_of(make_request(), candidates) == "b"


def test_a_queue_longer_than_the_cached_prefix_outweighs_it() -> None:
    busy = make_candidate("b", cached_blocks=8, load=make_load(queued_prefill_tokens=8 * 64 + 1))
    assert chosen_of(make_request(), [make_candidate("a"), busy]) == "a"


def test_a_queue_shorter_than_the_cached_prefix_does_not() -> None:
    busy = make_candidate("b", cached_blocks=8, load=make_load(queued_prefill_tokens=8 * 64 - 1))
    assert chosen_of(make_request(), [make_candidate("a"), busy]) == "b"


def test_the_last_token_of_a_cached_prompt_is_computed() -> None:
    chosen = place(make_request(prompt_tokens=640), [make_candidate(cached_blocks=10)])
    assert chosen is not None
    assert (chosen.cached_blocks, chosen.uncached_tokens) == (9, 64)


@pytest.mark.parametrize(("running", "ms"), [(0, 0.0), (1, 5.0)])
def test_a_first_token_takes_queue_prompt_and_half_a_step(running: int, ms: float) -> None:
    load = make_load(running, queued_prefill_tokens=360, prefill_tokens_per_second=1000.0, decode_step_ms=10.0)
    terms = predict_alone(
        make_request(prompt_tokens=640), [make_candidate(load=load)], replace(CONSTANTS, costs=STEADY)
    )
    assert terms[0].ttft_ms == 1000.0 + ms
    assert terms[0].tpot_ms == 10.0


@pytest.mark.parametrize(
    ("step_ms", "reported_at", "left_ms"),
    [
        (100.0, 4.97, 70.0),
        # The report of the step behind it has not come.
        (100.0, 4.87, 70.0),
        (100.0, None, 50.0),
        # Reports are further apart than such steps.
        (40.0, 4.99, 20.0),
    ],
)
def test_a_report_tells_what_is_left_of_the_next_step(
    step_ms: float, reported_at: float | None, left_ms: float
) -> None:
    load = make_load(1, prefill_tokens_per_second=1000.0, decode_step_ms=step_ms)
    candidate = make_candidate(load=load, step_began=reported_at)
    terms = predict(make_request(prompt_tokens=640), Candidates([candidate], now=5.0), replace(CONSTANTS, costs=STEADY))
    assert terms[0].ttft_ms == pytest.approx(640 + left_ms)


@pytest.mark.parametrize(("reported_at", "left_ms"), [(4.905, 100.0), (4.91, 5.0)])
def test_a_request_may_come_too_late_for_a_step(reported_at: float, left_ms: float) -> None:
    """Half of the time that requests take passes while the report is on its way, and the request behind it."""
    constants = replace(CONSTANTS, costs=msgspec.structs.replace(STEADY, request_ms=10.0))
    candidate = make_candidate(load=make_load(1, decode_step_ms=100.0), step_began=reported_at)
    terms = predict(make_request(prompt_tokens=640), Candidates([candidate], now=5.0), constants)
    assert terms[0].ttft_ms == pytest.approx(640 + 10 + left_ms)


def test_a_full_worker_delays_a_request_until_enough_requests_end() -> None:
    load = make_load(8, waiting_requests=1, decode_step_ms=10.0)
    terms = predict_alone(
        make_request(prompt_tokens=640), [make_candidate(load=load)], replace(CONSTANTS, costs=STEADY)
    )
    # Two of eight have to end, which have a hundred tokens each.
    assert terms[0].ttft_ms == pytest.approx(640 + 2 * 100 * 10 / 8 - 5)


def place_wait_ms(ends_ms: Sequence[float], stopping: float) -> float:
    """The wait of a request for a place on a worker that has two places, and as many requests as there are ends."""
    waiting = len(ends_ms) - 2
    load = make_load(running_requests=2, waiting_requests=waiting)
    full = make_candidate(load=load, max_requests=2, ends=[1000.0 + ms / 1000 for ms in ends_ms])
    request = make_request(mean_output_tokens=50.0, stopping=stopping)
    constants = replace(CONSTANTS, costs=STEADY)
    (terms,) = predict(request, Candidates([full], now=1000.0), constants)
    (idle,) = predict(request, Candidates([make_candidate()], now=1000.0), constants)
    return terms.ttft_ms - idle.ttft_ms


def test_a_place_is_free_when_an_answer_is_complete() -> None:
    assert place_wait_ms([300.0, 700.0], stopping=0.0) == pytest.approx(300.0)
    assert place_wait_ms([300.0, 700.0, 900.0], stopping=0.0) == pytest.approx(700.0)


def test_answers_that_stop_by_themselves_free_places_earlier() -> None:
    # Two answers of 50 tokens on average end every 500 ms, half a step earlier than the report says.
    assert place_wait_ms([1900.0, 1900.0], stopping=1.0) == pytest.approx(490.0)
    assert place_wait_ms([1900.0, 1900.0], stopping=0.5) == pytest.approx(990.0)
    assert place_wait_ms([300.0, 1900.0], stopping=0.5) == pytest.approx(300.0)
    # One is certain, and another stops meanwhile.
    assert place_wait_ms([300.0, 1900.0, 1900.0], stopping=0.5) == pytest.approx(990.0)


def test_one_more_request_lengthens_the_step() -> None:
    terms = predict_alone(make_request(), [make_candidate(load=make_load(running_requests=3))], CONSTANTS)
    assert terms[0].tpot_ms > 10.0


def test_a_full_batch_does_not_make_a_worker_slow() -> None:
    """An idle worker that was busy until now, and one that measured with two requests what one of its kind takes."""
    emptied = make_load(decode_step_ms=11.6, decode_step_requests=8.0)
    steady = make_load(running_requests=2, decode_step_ms=10.4)
    candidates = [make_candidate("a", load=steady), make_candidate("b", load=emptied)]
    by_worker = {term.worker_id: term for term in predict_alone(make_request(), candidates, CONSTANTS)}
    assert by_worker["b"].tpot_ms == pytest.approx(10.2, rel=1e-3)
    assert by_worker["a"].tpot_ms == pytest.approx(10.6, rel=1e-3)
    assert chosen_of(make_request(), candidates) == "b"


def test_the_slower_worker_loses() -> None:
    slow = make_candidate("a", load=make_load(prefill_tokens_per_second=500.0))
    assert chosen_of(make_request(), [slow, make_candidate("b")]) == "b"


def test_slots_left_are_counted_at_mean_output_length() -> None:
    candidate = make_candidate(max_requests=100, load=make_load(free_blocks=120))
    # 640 + 100 tokens are 12 blocks.
    assert (
        predict_alone(make_request(mean_output_tokens=100.0, max_tokens=1000), [candidate], CONSTANTS)[0].slots_left
        == 10
    )
    # At most max_tokens are generated: 640 + 10 tokens are 11 blocks.
    assert (
        predict_alone(make_request(mean_output_tokens=100.0, max_tokens=10), [candidate], CONSTANTS)[0].slots_left == 10
    )
    assert (
        predict_alone(make_request(mean_output_tokens=512.0, max_tokens=1000), [candidate], CONSTANTS)[0].slots_left
        == 6
    )


def test_a_full_worker_is_slower_than_one_with_a_slot() -> None:
    full = make_candidate("a", load=make_load(running_requests=8))
    assert chosen_of(make_request(), [full, make_candidate("b", load=make_load(running_requests=7))]) == "b"


def test_a_worker_without_blocks_is_slower_than_one_with_them() -> None:
    full = make_candidate("a", load=make_load(running_requests=4, free_blocks=2))
    other = make_candidate("b", load=make_load(running_requests=4, free_blocks=500))
    assert chosen_of(make_request(), [full, other]) == "b"


def test_a_worker_whose_queue_is_full_is_never_chosen() -> None:
    full = make_candidate(load=make_load(running_requests=8, waiting_requests=CONSTANTS.config.queue_requests))
    terms = predict_alone(make_request(), [full], CONSTANTS)
    assert choose(terms) is None
    assert terms[0].rejection is Rejection.FULL


def test_the_queue_has_room_for_exactly_its_length() -> None:
    load = make_load(running_requests=8, waiting_requests=CONSTANTS.config.queue_requests - 1)
    assert chosen_of(make_request(), [make_candidate("a", load=load)]) == "a"


def test_avoided_and_draining_workers_are_never_chosen() -> None:
    candidates = [
        make_candidate("a", cached_blocks=9),
        make_candidate("b", unusable="it is draining"),
        make_candidate("c"),
    ]
    assert chosen_of(make_request(avoid=frozenset({"a"})), candidates) == "c"
    terms = predict_alone(make_request(avoid=frozenset({"a", "c"})), candidates, CONSTANTS)
    assert choose(terms) is None
    assert [term.rejection for term in terms] == [Rejection.AVOIDED, Rejection.UNUSABLE, Rejection.AVOIDED]


def test_a_worker_whose_status_stream_broke_is_the_last_resort() -> None:
    broken = make_candidate("a", cached_blocks=9, connected=False)
    assert chosen_of(make_request(), [broken, make_candidate("b", load=make_load(running_requests=7))]) == "b"
    assert chosen_of(make_request(), [broken]) == "a"


def test_a_request_longer_than_context_or_pool_is_rejected() -> None:
    candidates = [make_candidate("context", context_tokens=700), make_candidate("pool", total_blocks=11)]
    terms = predict_alone(make_request(prompt_tokens=640, max_tokens=100), candidates, CONSTANTS)
    assert [term.rejection for term in terms] == [Rejection.CONTEXT, Rejection.CONTEXT]


def test_equal_candidates_are_taken_by_name() -> None:
    assert chosen_of(make_request(), [make_candidate("b"), make_candidate("a"), make_candidate("c")]) == "a"


def test_a_burst_between_two_statuses_spreads_evenly_over_equal_workers() -> None:
    candidates = [make_candidate(name, max_requests=16) for name in "abcd"]
    counts = spread(make_request(), candidates, 100, Constants())
    assert counts == {"a": 25, "b": 25, "c": 25, "d": 25}


def test_a_burst_of_one_cached_prompt_spreads_over_workers() -> None:
    candidates = [make_candidate("a", cached_blocks=9), make_candidate("b")]
    counts = spread(make_request(), candidates, 40, Constants())
    assert counts["a"] > counts["b"] > 0


def test_the_reason_names_the_terms() -> None:
    terms = predict_alone(make_request(), [make_candidate("a", cached_blocks=4), make_candidate("b")], CONSTANTS)
    chosen = choose(terms)
    assert chosen is not None
    reason = explain(make_request(), chosen, len(terms))
    assert reason.startswith("a: ")
    assert "384 prompt tokens to compute, 4 blocks cached" in reason
    assert "best of 2" in reason


loads = st.builds(
    make_load,
    running_requests=st.integers(0, 20),
    waiting_requests=st.integers(0, 20),
    queued_prefill_tokens=st.integers(0, 100_000),
    free_blocks=st.integers(0, 1000),
    prefill_tokens_per_second=st.sampled_from([None, 10.0, 1e6]),
    decode_step_ms=st.sampled_from([None, 0.01, 50.0]),
    mean_output_tokens=st.sampled_from([None, 1.0, 3000.0]),
)
candidate_lists = st.lists(
    st.builds(
        make_candidate,
        worker_id=st.sampled_from("abcdefgh"),
        unusable=st.sampled_from([None, "it is draining"]),
        connected=st.booleans(),
        max_requests=st.integers(1, 16),
        cached_blocks=st.integers(0, 100),
        load=loads,
    ),
    max_size=6,
    unique_by=lambda candidate: candidate.identity.worker_id,
)
requests = st.builds(
    make_request,
    prompt_tokens=st.integers(1, 5000),
    max_tokens=st.integers(1, 5000),
    avoid=st.frozensets(st.sampled_from("abcdefgh"), max_size=3),
)


@given(requests, candidate_lists)
def test_predictions_are_finite_and_not_negative(request: PlacementRequest, candidates: list[CandidateWorker]) -> None:
    for term in predict_alone(request, candidates, CONSTANTS):
        assert 0 < term.tpot_ms < float("inf")
        assert 0 < term.ttft_ms <= term.total_ms < float("inf")
        assert term.slots_left >= 0
        assert 1 <= term.uncached_tokens <= request.query.prompt_tokens


@given(requests, candidate_lists)
def test_the_cheapest_worker_that_takes_the_request_is_chosen(
    request: PlacementRequest, candidates: list[CandidateWorker]
) -> None:
    terms = predict_alone(request, candidates, CONSTANTS)
    chosen = choose(terms)
    usable = [term for term in terms if term.rejection is None]
    assert (chosen is None) == (not usable)
    if chosen is not None:
        worker = next(candidate for candidate in candidates if candidate.identity.worker_id == chosen.worker_id)
        assert worker.unusable is None
        assert worker.identity.worker_id not in request.query.avoid
        assert request.query.prompt_tokens + request.query.max_tokens <= worker.identity.context_tokens
        assert worker.connected or not any(not term.disconnected for term in usable)
        assert all(chosen.total_ms <= term.total_ms for term in usable if term.disconnected == chosen.disconnected)


@given(requests, candidate_lists, st.randoms(use_true_random=False))
def test_the_order_of_candidates_does_not_matter(
    request: PlacementRequest, candidates: list[CandidateWorker], random: Random
) -> None:
    first = place(request, candidates)
    shuffled = list(candidates)
    random.shuffle(shuffled)
    assert place(request, shuffled) == first


@given(requests, candidate_lists)
def test_more_cached_blocks_never_delay_the_first_token(
    request: PlacementRequest, candidates: list[CandidateWorker]
) -> None:
    without = predict_alone(
        request, [msgspec.structs.replace(candidate, cached_blocks=0) for candidate in candidates], CONSTANTS
    )
    for better, worse in zip(predict_alone(request, candidates, CONSTANTS), without, strict=True):
        assert better.ttft_ms <= worse.ttft_ms
