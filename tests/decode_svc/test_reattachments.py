"""Streams that break, come back or are replaced: which requests go on, from where, and which do not."""

import pytest

from mesh.domain.outputs import FinishReason
from mesh.errors import LeaseConflict, StreamReplaced, UnknownRequest
from tests.support.decode_sessions import GRACE, attach, make_sessions, taken
from tests.support.decoding import make_submission


async def test_a_resumed_request_continues_at_the_gateways_position() -> None:
    sessions, rank, _ = make_sessions()
    attachment = attach(sessions)
    sessions.submit(attachment, make_submission())
    for _ in range(4):
        sessions.on_step(rank.step(rank.output(0)))
    # The gateway got two of them before the stream broke.
    await taken(attachment)
    sessions.detach(attachment)
    sessions.on_step(rank.step(rank.output(0, 1, "stop")))
    again = attach(sessions, _1=5)
    assert await taken(again) == {1: (5, [2, 3, 4], FinishReason.STOP)}


async def test_a_lost_frame_is_sent_again_with_its_end() -> None:
    sessions, rank, _ = make_sessions()
    attachment = attach(sessions)
    sessions.submit(attachment, make_submission())
    sessions.on_step(rank.step(rank.output(0, 2, "stop")))
    lost = await taken(attachment)
    sessions.detach(attachment)
    assert await taken(attach(sessions, _1=3)) == lost == {1: (3, [0, 1], FinishReason.STOP)}


async def test_a_gateway_that_has_everything_is_sent_nothing() -> None:
    sessions, rank, _ = make_sessions()
    attachment = attach(sessions)
    sessions.submit(attachment, make_submission())
    sessions.on_step(rank.step(rank.output(0, 2)))
    again = attach(sessions, _1=5)
    assert again.session.take_frame() is None


async def test_a_request_that_the_gateway_no_longer_names_is_cancelled() -> None:
    sessions, rank, _ = make_sessions()
    attachment = attach(sessions)
    sessions.submit(attachment, make_submission(1))
    sessions.submit(attachment, make_submission(2))
    sessions.detach(attachment)
    attach(sessions, _2=3)
    assert rank.cancelled == [0]
    assert (sessions.live_requests, sessions.kept_requests) == (1, 1)
    sessions.on_step(rank.step(rank.output(0, 0, "cancelled")))
    assert sessions.kept_requests == 1


@pytest.mark.parametrize("position", [2, 5, 1000])
async def test_a_request_resumed_past_its_tokens_is_unknown(position: int) -> None:
    sessions, rank, _ = make_sessions()
    attachment = attach(sessions)
    sessions.submit(attachment, make_submission())
    sessions.on_step(rank.step(rank.output(0)))
    again = attach(sessions, _1=position)
    ((first_position, tokens, end),) = (await taken(again)).values()
    assert (first_position, tokens) == (position, [])
    assert isinstance(end, UnknownRequest)
    assert rank.cancelled == [0]


async def test_a_request_that_the_worker_never_had_is_unknown() -> None:
    sessions, _, _ = make_sessions()
    attachment = attach(sessions, _7=12)
    ((position, _, end),) = (await taken(attachment)).values()
    assert position == 12
    assert isinstance(end, UnknownRequest)
    sessions.acknowledge(attachment, [7])
    assert sessions.kept_requests == 0


async def test_a_second_stream_replaces_the_first() -> None:
    sessions, rank, _ = make_sessions()
    first = attach(sessions)
    sessions.submit(first, make_submission())
    second = attach(sessions, _1=3)
    with pytest.raises(StreamReplaced):
        await first.next_frame()
    with pytest.raises(StreamReplaced):
        sessions.submit(first, make_submission(2))
    sessions.detach(first)
    sessions.on_step(rank.step(rank.output(0)))
    assert await taken(second) == {1: (3, [0], None)}
    assert not sessions.alone.is_set()


async def test_a_new_incarnation_cancels_what_the_old_one_ran() -> None:
    sessions, rank, _ = make_sessions()
    old = attach(sessions, incarnation="old")
    sessions.submit(old, make_submission())
    sessions.detach(old)
    attach(sessions, incarnation="new")
    assert rank.cancelled == [0]
    assert sessions.kept_requests == 0


async def test_a_second_live_gateway_of_one_id_is_refused() -> None:
    sessions, rank, _ = make_sessions()
    first = attach(sessions, incarnation="first")
    sessions.submit(first, make_submission(1))
    with pytest.raises(LeaseConflict, match="its own gateway_id"):
        attach(sessions, incarnation="second")
    sessions.on_step(rank.step(rank.output(0)))
    assert await taken(first) == {1: (3, [0], None)}


async def test_requests_outlive_a_broken_stream_by_the_grace() -> None:
    sessions, rank, clock = make_sessions()
    attachment = attach(sessions)
    sessions.submit(attachment, make_submission())
    sessions.detach(attachment)
    clock.now += GRACE - 0.1
    sessions.expire()
    assert sessions.live_requests == 1
    clock.now += 0.1
    sessions.expire()
    assert rank.cancelled == [0]
    assert (sessions.live_requests, sessions.kept_requests) == (0, 0)
    again = attach(sessions, _1=3)
    ((_, _, end),) = (await taken(again)).values()
    assert isinstance(end, UnknownRequest)
