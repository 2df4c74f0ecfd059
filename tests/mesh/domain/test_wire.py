import pytest
from deepmesh.internal.v1 import decode_pb2
from deepmesh.v1 import common_pb2
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain import wire
from mesh.domain.constraints import Constraint
from mesh.domain.outputs import FinishReason, Logprobs
from mesh.domain.requests import Submission, TokenRequest
from mesh.domain.sampling import Sampling, StopConditions
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.domain.targets import StoreTarget, WorkerTarget

narrow = st.floats(0, 100, width=32)
samplings = st.builds(
    Sampling,
    temperature=narrow,
    top_p=st.floats(2**-19, 1, width=32),
    top_k=st.integers(0, 2**32 - 1),
    seed=st.integers(0, 2**64 - 1),
    top_logprobs=st.none() | st.integers(0, 20),
    min_p=st.floats(0, 1, width=32),
    presence_penalty=st.floats(-2, 2, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    repetition_penalty=st.floats(2**-10, 100, width=32),
    logit_bias=st.dictionaries(st.integers(0, 2**32 - 1), st.floats(-100, 100, width=32), max_size=4),
)
alternatives = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.floats(-100, 0, width=32)), max_size=4)


@given(samplings)
def test_sampling_survives_the_wire(sampling: Sampling) -> None:
    sent = wire.sampling_message(sampling).SerializeToString()
    assert wire.sampling(common_pb2.SamplingParams.FromString(sent)) == sampling


def test_no_top_p_keeps_all() -> None:
    assert wire.sampling(common_pb2.SamplingParams()) == Sampling()


@given(st.floats(-100, 0, width=32), alternatives)
def test_log_probabilities_survive_the_wire(logprob: float, top: list[tuple[int, float]]) -> None:
    position = Logprobs(logprob, [token_id for token_id, _ in top], [value for _, value in top])
    found = wire.logprobs(wire.logprobs_message(position))
    assert (found.logprob, list(found.top)) == (logprob, top)


def test_targets_survive_the_wire() -> None:
    store = StoreTarget("store-1", 7)
    assert wire.store_target(wire.store_target_message(store)) == store
    for worker in (WorkerTarget("w", "first", "w:1", 1024, 0), WorkerTarget("w", "first", "w:1")):
        assert wire.worker_target(wire.worker_target_message(worker)) == worker


@pytest.mark.parametrize("reason", FinishReason)
def test_a_finish_reason_survives_the_wire(reason: FinishReason) -> None:
    assert wire.finish_reason(wire.finish_reason_number(reason)) is reason


def test_an_unknown_finish_reason_reads_as_a_stop() -> None:
    assert wire.finish_reason(99) is FinishReason.STOP


def test_the_smallest_top_p_does_not_read_as_all() -> None:
    assert wire.sampling(wire.sampling_message(Sampling(top_p=1e-60))).top_p < 1e-5


@pytest.mark.parametrize("prefill", [None, WorkerTarget("p", "first", "p:1", 1 << 20)])
@pytest.mark.parametrize("store", [None, StoreTarget("store-1", 7)])
@pytest.mark.parametrize("ranks", [(None, None), (0, 3)])
def test_a_submission_survives_the_wire(
    prefill: WorkerTarget | None, store: StoreTarget | None, ranks: tuple[int | None, int | None]
) -> None:
    request = TokenRequest(
        request_id="r1",
        token_ids=[1, 2, 3],
        sampling=Sampling(temperature=0.5, seed=7),
        stop=StopConditions(100, [4, 5], ignore_eos=True),
        cache_salt=b"salt",
        attempt=2,
        prompt_tokens=2,
        constraint=Constraint("start: /a+/", 0, 5, may_end_free=True, banned=[[1, 2]], min_tokens=3),
        sparse=SparsePrefill(16384, 0.95),
    )
    submission = Submission(9, request, 1500, prefill, store, rank=ranks[0], prefill_rank=ranks[1])
    sent = wire.submission_message(submission).SerializeToString()
    assert wire.submission(decode_pb2.Submission.FromString(sent)) == submission
