import pytest

from decode_svc.requests import prefill_lost
from decode_svc.session import FRAME_TOKENS
from decode_svc.sessions import GatewaySessions
from decode_svc.wire import step_frame
from engine.protocol.messages import Output, Refusal
from mesh.domain.outputs import CachedTokens, FinishReason, Logprobs
from mesh.domain.sampling import Sampling
from mesh.domain.shares import Share
from mesh.errors import (
    ContextExceeded,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    MeshError,
    NamespaceMismatch,
    Overloaded,
    PrefillLost,
    RemoteError,
    ShuttingDown,
    WorkerFull,
)
from tests.support.decode_sessions import GRACE, attach, make_sessions, taken
from tests.support.decoding import PREFILL, FakePrompts, FakeRank, make_submission
from tests.support.scheduling import ManualClock


async def test_a_step_is_one_frame_for_each_gateway() -> None:
    sessions, rank, _ = make_sessions()
    first, second = attach(sessions, "a"), attach(sessions, "b")
    for stream_id in (1, 2):
        sessions.submit(first, make_submission(stream_id))
    sessions.submit(second, make_submission(1))
    sessions.on_step(rank.step(rank.output(0), rank.output(1, count=2), rank.output(2)))
    assert await taken(first) == {1: (3, [0], None), 2: (3, [1000, 1001], None)}
    assert await taken(second) == {1: (3, [2000], None)}


async def test_steps_that_a_gateway_did_not_read_become_one_frame() -> None:
    sessions, rank, _ = make_sessions()
    attachment = attach(sessions)
    sessions.submit(attachment, make_submission())
    for _ in range(3):
        sessions.on_step(rank.step(rank.output(0)))
    frame = await attachment.next_frame()
    assert frame is not None
    assert frame.step == 3
    assert list(frame.outputs[0].token_ids) == [0, 1, 2]


async def test_cached_tokens_come_with_the_first_token_alone() -> None:
    sessions, rank, _ = make_sessions()
    attachment = attach(sessions)
    sessions.submit(attachment, make_submission())
    seen = []
    for _ in range(2):
        sessions.on_step(rank.step(rank.output(0)))
        frame = await attachment.next_frame()
        assert frame is not None
        seen.append(frame.outputs[0].cached)
    assert seen == [CachedTokens(), None]


async def test_a_frame_holds_a_bounded_number_of_tokens() -> None:
    sessions, rank, _ = make_sessions()
    attachment = attach(sessions)
    for stream_id in (1, 2):
        sessions.submit(attachment, make_submission(stream_id))
    count = FRAME_TOKENS - 10
    sessions.on_step(rank.step(rank.output(0, count, "length"), rank.output(1, count, "length")))
    first, second = await taken(attachment), await taken(attachment)
    assert [(len(tokens), end) for _, tokens, end in first.values()] == [(count, FinishReason.LENGTH), (9, None)]
    assert [(len(tokens), end) for _, tokens, end in second.values()] == [(count - 9, FinishReason.LENGTH)]
    assert second[2][0] == 3 + 9


async def test_a_token_with_log_probabilities_weighs_more_in_a_frame() -> None:
    sessions, rank, _ = make_sessions()
    attachment = attach(sessions)
    sessions.submit(attachment, make_submission(sampling=Sampling(top_logprobs=20)))
    count = 2000
    logprobs = [Logprobs(-1.0, list(range(20)), [-1.0] * 20)] * count
    sessions.on_step(rank.step(rank.output(0, count, logprobs=logprobs)))
    assert sessions.backlog(attachment, Share()).kept_tokens == 42 * count
    frame = await attachment.next_frame()
    assert frame is not None
    assert len(frame.outputs[0].token_ids) == len(frame.outputs[0].logprobs) == FRAME_TOKENS // 42


async def test_a_cancelled_request_ends_when_the_rank_reports_it() -> None:
    sessions, rank, _ = make_sessions()
    attachment = attach(sessions)
    sessions.submit(attachment, make_submission())
    sessions.cancel(attachment, 1)
    sessions.cancel(attachment, 99)
    assert rank.cancelled == [0]
    sessions.on_step(rank.step(rank.output(0, 0, "cancelled")))
    assert await taken(attachment) == {1: (3, [], FinishReason.CANCELLED)}
    sessions.cancel(attachment, 1)
    assert rank.cancelled == [0]


async def test_a_request_that_the_rank_refuses_fails() -> None:
    sessions, rank, _ = make_sessions()
    attachment = attach(sessions)
    sessions.submit(attachment, make_submission())
    sessions.on_step(rank.step(Output(0, 0, [], refusal=Refusal("CONTEXT_EXCEEDED", "too long"))))
    ((_, _, end),) = (await taken(attachment)).values()
    assert isinstance(end, ContextExceeded)
    assert sessions.live_requests == 0


@pytest.mark.parametrize(("reason", "error"), [("NAMESPACE_MISMATCH", NamespaceMismatch), ("NEW", RemoteError)])
async def test_a_refusal_keeps_its_reason_and_is_no_invalid_request(reason: str, error: type[MeshError]) -> None:
    sessions, rank, _ = make_sessions()
    attachment = attach(sessions)
    sessions.submit(attachment, make_submission())
    sessions.on_step(rank.step(Output(0, 0, [], refusal=Refusal(reason, "why"))))
    ((_, _, end),) = (await taken(attachment)).values()
    assert isinstance(end, MeshError)
    assert (type(end), end.reason, end.message) == (error, reason, "why")


async def test_a_refused_request_never_reaches_the_rank() -> None:
    sessions, rank, _ = make_sessions()
    attachment = attach(sessions)
    sessions.refuse(attachment, make_submission(), error := WorkerFull("full"))
    assert await taken(attachment) == {1: (3, [], error)}
    assert rank.submitted == {}
    assert sessions.kept_requests == 1
    sessions.acknowledge(attachment, [1, 2])
    assert sessions.kept_requests == 0


async def test_a_running_request_cannot_be_acknowledged() -> None:
    sessions, rank, _ = make_sessions()
    attachment = attach(sessions)
    sessions.submit(attachment, make_submission())
    sessions.acknowledge(attachment, [1])
    sessions.on_step(rank.step(rank.output(0)))
    assert await taken(attachment) == {1: (3, [0], None)}


async def test_a_request_over_its_deadline_fails_and_is_cancelled() -> None:
    sessions, rank, clock = make_sessions()
    attachment = attach(sessions)
    sessions.submit(attachment, make_submission(1, deadline_ms=50))
    sessions.submit(attachment, make_submission(2))
    sessions.on_step(rank.step(rank.output(0)))
    clock.now += 0.05
    sessions.expire()
    ((position, tokens, end),) = (await taken(attachment)).values()
    assert (position, tokens) == (3, [0])
    assert isinstance(end, DeadlineExceeded)
    assert rank.cancelled == [0]
    sessions.on_step(rank.step(rank.output(0, 1, "cancelled"), rank.output(1)))
    assert list(await taken(attachment)) == [2]


async def test_the_death_of_the_rank_fails_every_live_request_once() -> None:
    sessions, rank, _ = make_sessions()
    attachment = attach(sessions)
    for stream_id in (1, 2):
        sessions.submit(attachment, make_submission(stream_id))
    sessions.on_step(rank.step(rank.output(0, 1, "stop")))
    rank.dead = True
    sessions.fail_all(error := EngineFailed("gone"))
    sessions.submit(attachment, make_submission(3))
    frame = await taken(attachment)
    assert (frame[1][2], frame[2][2]) == (FinishReason.STOP, error)
    assert isinstance(frame[3][2], EngineFailed)
    assert sessions.idle.is_set()


async def test_a_stream_delivers_what_there_is_before_it_ends() -> None:
    sessions, rank, _ = make_sessions()
    attachment = attach(sessions)
    sessions.submit(attachment, make_submission())
    sessions.on_step(rank.step(rank.output(0, 1, "stop")))
    sessions.end_streams(ShuttingDown("stopping"))
    assert await taken(attachment) == {1: (3, [0], FinishReason.STOP)}
    with pytest.raises(ShuttingDown):
        await attachment.next_frame()


def test_the_backlog_counts_prompts_without_a_first_token() -> None:
    sessions, rank, _ = make_sessions()
    attachment = attach(sessions)
    for stream_id in (1, 2, 3):
        sessions.submit(attachment, make_submission(stream_id, token_ids=[1] * 10 * stream_id))
    assert sessions.backlog(attachment, Share()).queued_prefill_tokens == 60
    sessions.on_step(rank.step(rank.output(0), rank.output(1, 0, "cancelled")))
    assert sessions.backlog(attachment, Share()).queued_prefill_tokens == 30
    sessions.on_step(rank.step(rank.output(2), rank.output(0)))
    assert sessions.backlog(attachment, Share()).queued_prefill_tokens == 0


def test_a_stream_id_is_not_used_twice() -> None:
    sessions, rank, _ = make_sessions()
    attachment = attach(sessions)
    sessions.submit(attachment, make_submission())
    with pytest.raises(InvalidRequest, match="stream_id 1 is in use"):
        sessions.submit(attachment, make_submission())
    assert len(rank.submitted) == 1


def test_gateways_and_their_requests_are_bounded() -> None:
    sessions, _, _ = make_sessions(gateways=1, requests=1)
    attachment = attach(sessions, "a")
    with pytest.raises(Overloaded):
        attach(sessions, "b")
    # One that leaves with nothing running makes room at once.
    sessions.detach(attachment)
    sessions.detach(attach(sessions, "b"))
    attachment = attach(sessions, "a")
    sessions.refuse(attachment, make_submission(1), WorkerFull("full"))
    with pytest.raises(Overloaded):
        sessions.submit(attachment, make_submission(2))
    with pytest.raises(Overloaded):
        attach(sessions, "a", _1=3, _2=3)


async def test_a_prompt_computed_elsewhere_is_expected_until_its_request_ends() -> None:
    rank, prompts = FakeRank(), FakePrompts()
    sessions = GatewaySessions(rank, prompts, ManualClock(), GRACE)
    attachment = attach(sessions)
    submission = make_submission(prefill=PREFILL)
    sessions.submit(attachment, submission)
    assert (rank.submitted[0].remote_prefill, prompts.expected) == (True, {0: submission})
    assert sessions.backlog(attachment, Share()).queued_prefill_tokens == 0
    sessions.on_step(rank.step(rank.output(0)))
    assert prompts.expected
    sessions.on_step(rank.step(rank.output(0, finish=FinishReason.LENGTH)))
    assert not prompts.expected
    sessions.submit(attachment, make_submission(2))
    assert (rank.submitted[1].remote_prefill, prompts.expected) == (False, {})


async def test_a_lost_prefill_ends_the_request_and_names_the_worker() -> None:
    sessions, rank, _ = make_sessions()
    attachment = attach(sessions)
    sessions.submit(attachment, make_submission(1, prefill=PREFILL))
    sessions.submit(attachment, make_submission(2, prefill=PREFILL))
    sessions.lose_prompt(0, prefill_lost(PREFILL, "it died"))
    refusal = Refusal(PrefillLost.reason, "the KV did not land in time")
    sessions.on_step(rank.step(Output(1, 3, [], refusal=refusal)))
    ends = await taken(attachment)
    assert (rank.cancelled, sessions.live_requests) == ([0], 0)
    for stream_id in (1, 2):
        error = ends[stream_id][2]
        assert isinstance(error, PrefillLost)
        assert error.metadata == {"worker_id": "prefill-1"}
    sessions.lose_prompt(0, prefill_lost(PREFILL, "again"))
    assert rank.cancelled == [0]


async def test_frames_say_once_an_answer_is_relaxed() -> None:
    sessions, rank, _ = make_sessions()
    attachment = attach(sessions)
    sessions.submit(attachment, make_submission(1))
    said = []
    for relaxed in (False, True, False):
        output = rank.output(0)
        output.relaxed = relaxed
        sessions.on_step(rank.step(output))
        frame = await attachment.next_frame()
        assert frame is not None
        said += [message.relaxed for message in step_frame(frame).frame.outputs]
    assert said == [False, True, True]
