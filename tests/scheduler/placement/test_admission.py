from mesh.errors import ContextExceeded, NoWorker, Overloaded
from scheduler.config import ObjectivesConfig
from scheduler.placement.choose import MAX_RETRY_MS, MIN_RETRY_MS, admit, refusal
from scheduler.placement.terms import Rejection
from tests.support.scheduling import choose, make_candidate, make_constants, make_load, make_request, predict_alone

CONSTANTS = make_constants(queue_requests=0)
FULL = make_load(running_requests=8)


def test_without_objectives_nothing_is_refused() -> None:
    terms = predict_alone(make_request(), [make_candidate(load=make_load(queued_prefill_tokens=10**9))], CONSTANTS)
    assert admit(terms, ObjectivesConfig()) == terms


def test_a_late_first_token_is_refused_with_a_delay() -> None:
    objectives = ObjectivesConfig(ttft_ms=1000.0)
    terms = admit(
        predict_alone(make_request(), [make_candidate(load=make_load(queued_prefill_tokens=3360))], CONSTANTS),
        objectives,
    )
    assert terms[0].rejection is Rejection.OBJECTIVE
    assert choose(terms) is None
    error = refusal("oracle", terms, objectives)
    assert isinstance(error, Overloaded)
    # 4000 tokens at 1000/s are due at 4000 ms, of which 3360 are a wait: in 3216 ms it is 144, and 216 more at most.
    assert error.retry_after_ms == 3216


def test_a_wait_counts_with_its_margin() -> None:
    waiting = make_candidate("a", load=make_load(queued_prefill_tokens=400))
    computing = predict_alone(make_request(prompt_tokens=1040), [make_candidate("a")], CONSTANTS)
    (wait,) = predict_alone(make_request(), [waiting], CONSTANTS)
    assert computing[0].ttft_ms == wait.ttft_ms == 1040.0
    assert choose(admit(computing, ObjectivesConfig(ttft_ms=1050.0))) is not None
    refused = admit([wait], ObjectivesConfig(ttft_ms=1050.0))
    assert choose(refused) is None
    assert "first token of 1040.0 ms, 600.0 ms more if it waits as long as it may" in refused[0].rejected
    assert choose(admit([wait], ObjectivesConfig(ttft_ms=1640.0))) is not None
    assert choose(admit([wait], ObjectivesConfig(ttft_ms=1050.0, wait_margin=0.0))) is not None


def test_a_token_rate_predicted_too_low_is_refused() -> None:
    objectives = ObjectivesConfig(tpot_ms=10.5)
    terms = predict_alone(
        make_request(), [make_candidate("a", load=make_load(running_requests=7, decode_step_ms=11.0))], CONSTANTS
    )
    terms = admit(terms, objectives)
    assert choose(terms) is None
    assert isinstance(refusal("oracle", terms, objectives), Overloaded)


def test_a_worker_within_the_objective_goes_before_a_quicker_one() -> None:
    # a starts late and is quick afterwards; b starts at once.
    late = make_candidate("a", load=make_load(queued_prefill_tokens=2000, decode_step_ms=1.0))
    soon = make_candidate("b", load=make_load(decode_step_ms=40.0))
    terms = predict_alone(make_request(), [late, soon], CONSTANTS)
    unbound, bound = choose(terms), choose(admit(terms, ObjectivesConfig(ttft_ms=1500.0)))
    assert unbound is not None
    assert bound is not None
    assert (unbound.worker_id, bound.worker_id) == ("a", "b")


def test_a_full_mesh_names_the_time_until_a_request_ends() -> None:
    terms = predict_alone(make_request(), [make_candidate("a", load=FULL)], CONSTANTS)
    error = refusal("oracle", terms, ObjectivesConfig())
    assert isinstance(error, Overloaded)
    # 100 tokens of 10 ms, 8 requests at once.
    assert error.retry_after_ms == 125


def test_the_delay_stays_within_bounds() -> None:
    quick = predict_alone(
        make_request(), [make_candidate(load=make_load(running_requests=8, decode_step_ms=0.1))], CONSTANTS
    )
    slow = predict_alone(
        make_request(), [make_candidate(load=make_load(running_requests=8, decode_step_ms=1e6))], CONSTANTS
    )
    assert refusal("oracle", quick, ObjectivesConfig()).retry_after_ms == MIN_RETRY_MS
    assert refusal("oracle", slow, ObjectivesConfig()).retry_after_ms == MAX_RETRY_MS


def test_a_request_too_long_for_every_worker_is_invalid() -> None:
    terms = predict_alone(
        make_request(prompt_tokens=5000), [make_candidate("a"), make_candidate("b", load=FULL)], CONSTANTS
    )
    error = refusal("oracle", terms, ObjectivesConfig())
    assert isinstance(error, ContextExceeded)
    assert error.retry_after_ms is None


def test_a_request_too_long_for_some_is_retried() -> None:
    candidates = [make_candidate("short", context_tokens=100), make_candidate("full", load=FULL)]
    assert isinstance(
        refusal("oracle", predict_alone(make_request(), candidates, CONSTANTS), ObjectivesConfig()), Overloaded
    )


def test_a_mesh_whose_only_worker_refused_the_request_is_full() -> None:
    terms = predict_alone(make_request(avoid=frozenset({"decode-1"})), [make_candidate()], CONSTANTS)
    assert isinstance(refusal("oracle", terms, ObjectivesConfig()), Overloaded)


def test_with_draining_workers_alone_there_is_no_worker() -> None:
    terms = predict_alone(make_request(), [make_candidate(unusable="it is draining")], CONSTANTS)
    assert isinstance(refusal("oracle", terms, ObjectivesConfig()), NoWorker)
