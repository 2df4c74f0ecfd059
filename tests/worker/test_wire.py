from deepmesh.v1 import common_pb2
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.messages import Fetch, Logprobs, Sampling
from worker import wire

narrow = st.floats(0, 100, width=32)
samplings = st.builds(
    Sampling,
    temperature=narrow,
    top_p=st.floats(0, 1, width=32, exclude_min=True),
    top_k=st.integers(0, 2**32 - 1),
    seed=st.integers(0, 2**64 - 1),
    top_logprobs=st.none() | st.integers(0, 20),
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
    assert wire.logprobs(wire.logprobs_message(position)) == position


def test_a_store_survives_the_wire() -> None:
    assert wire.fetch(wire.fetch_message(Fetch("store-1", 7))) == Fetch("store-1", 7)
