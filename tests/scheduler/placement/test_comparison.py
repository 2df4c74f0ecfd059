"""The best candidate is found without a look at what every other would mean."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.costs import CostModel
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.targets import StoreTarget
from scheduler.config import ObjectivesConfig
from scheduler.placement.candidates import Candidates, CandidateWorker, PlacementRequest
from scheduler.placement.choose import Comparison
from scheduler.placement.constants import Constants
from tests.support.scheduling import NAMESPACE, make_candidate, make_constants, make_load, make_request

SLOW_PROMPTS = CostModel(prefill_tokens_per_second=300.0, request_ms=1.0)
workers = st.lists(
    st.builds(
        make_candidate,
        worker_id=st.uuids().map(str),
        unusable=st.sampled_from([None, None, None, "it is draining"]),
        connected=st.sampled_from([True, True, False]),
        can_prefill=st.booleans(),
        receives_kv=st.booleans(),
        cached_blocks=st.integers(0, 12),
        load=st.builds(
            make_load,
            running_requests=st.integers(0, 9),
            waiting_requests=st.integers(0, 3),
            queued_prefill_tokens=st.integers(0, 5000),
            decode_step_ms=st.sampled_from([None, 1.0, 10.0, 50.0]),
            mean_output_tokens=st.sampled_from([None, 1.0, 300.0]),
        ),
    ),
    max_size=5,
)


@given(
    workers,
    workers,
    st.builds(make_request, prompt_tokens=st.integers(1, 900), ahead=st.sampled_from([1.0, 0.3])),
    st.sampled_from([Constants(), make_constants(costs=SLOW_PROMPTS, interference=0.5, queue_requests=2)]),
    st.sampled_from([ObjectivesConfig(), ObjectivesConfig(ttft_ms=700.0, tpot_ms=30.0)]),
    st.sampled_from([{}, {NAMESPACE: StoreTarget("store", 8, disk_blocks=3)}]),
)
def test_the_best_is_the_first_that_was_not_rejected(
    decode: list[CandidateWorker],
    prefill: list[CandidateWorker],
    request: PlacementRequest,
    constants: Constants,
    objectives: ObjectivesConfig,
    stores: dict[KvNamespace, StoreTarget],
) -> None:
    compared = Comparison(request, Candidates(decode, prefill, stores), constants, objectives)
    choice, terms = compared.best(), compared.terms()
    assert choice.best == (terms[0] if terms and terms[0].rejection is None else None)
    assert choice.count == len(terms)


def test_workers_that_cannot_win_are_left_out() -> None:
    busy = [make_candidate(f"d{number}", load=make_load(number, decode_step_requests=1)) for number in range(7)]
    compared = Comparison(make_request(prompt_tokens=1), Candidates(busy), Constants(), ObjectivesConfig())
    choice = compared.best()
    assert choice.best is not None
    assert [term.worker_id for term in choice.terms] == ["d0"]
