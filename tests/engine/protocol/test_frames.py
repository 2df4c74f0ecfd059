from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.frames import HEADER, MAX_FRAME_BYTES, FrameDecoder, FrameEncoder
from engine.protocol.messages import Cancel, FromRank, Output, Refusal, StepResult, Stop, Submit, ToRank
from mesh.domain.outputs import FinishReason, Logprobs
from mesh.domain.requests import TokenRequest
from mesh.domain.sampling import Sampling, StopConditions
from mesh.domain.workers import WorkerLoad
from mesh.errors import EngineFailed

LOAD = WorkerLoad(1, 2, 3, 4, 5.0, 6.0, 7.0)

keys = st.integers(0, 2**63)
token_ids = st.lists(st.integers(0, 2**20), max_size=5)
submits = st.builds(
    Submit,
    key=keys,
    request=st.builds(
        TokenRequest,
        request_id=st.text(max_size=10),
        token_ids=token_ids,
        sampling=st.builds(Sampling, seed=st.integers(0, 2**64 - 1)),
        stop=st.builds(StopConditions, max_tokens=st.integers(1, 100), token_ids=token_ids),
        cache_salt=st.binary(max_size=20),
    ),
)
messages_to_rank = st.lists(st.one_of(submits, st.builds(Cancel, key=keys), st.builds(Stop)), max_size=6)


def encoded(messages: list[ToRank]) -> bytes:
    encoder = FrameEncoder()
    return b"".join(bytes(encoder.encode(message)) for message in messages)


@given(messages=messages_to_rank, cuts=st.lists(st.integers(0, 1000), max_size=6))
def test_messages_survive_however_the_bytes_are_split(messages: list[ToRank], cuts: list[int]) -> None:
    stream = encoded(messages)
    bounds = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    decoder: FrameDecoder[ToRank] = FrameDecoder(ToRank)
    received = [message for start, end in pairwise(bounds) for message in decoder.feed(stream[start:end])]
    assert received == messages


def test_a_step_result_survives_with_all_it_may_hold() -> None:
    outputs = [
        Output(1, 10, [7], [Logprobs(-0.5, [7, 8], [-0.5, -2.0])], cached_tokens=64),
        Output(2, 11, [], finish=FinishReason.CANCELLED),
        Output(3, 0, [], refusal=Refusal("CONTEXT_EXCEEDED", "too long")),
    ]
    result = StepResult(5, outputs, LOAD, stored_blocks=[b"a" * 16], removed_blocks=[b"b" * 16])
    decoder: FrameDecoder[FromRank] = FrameDecoder(FromRank)
    assert decoder.feed(bytes(FrameEncoder().encode(result))) == [result]


def test_a_frame_over_the_bound_fails_before_it_is_read() -> None:
    with pytest.raises(EngineFailed, match="bytes"):
        FrameDecoder(ToRank).feed(HEADER.pack(MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize("body", [b"\xc1", msgspec.msgpack.encode({"type": "nonsense"}), b""])
def test_a_body_that_is_no_message_is_an_error(body: bytes) -> None:
    with pytest.raises(EngineFailed, match="none of its messages"):
        FrameDecoder(ToRank).feed(HEADER.pack(len(body)) + body)
