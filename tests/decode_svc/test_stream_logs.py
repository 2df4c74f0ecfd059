"""Output that is kept for clients that come back through another gateway."""

import pytest

from decode_svc.requests import make_request
from decode_svc.session import GatewaySession
from decode_svc.stream_logs import StreamLogs
from mesh.domain.requests import StreamTag, Submission
from mesh.errors import UnknownStream
from tests.support.decoding import make_submission
from tests.support.scheduling import ManualClock

KEEP_SECONDS = 60.0


class Logs:
    def __init__(self, max_tokens: int = 1000, keep_seconds: float = KEEP_SECONDS) -> None:
        self.clock = ManualClock()
        self.logs = StreamLogs(self.clock, keep_seconds, max_tokens)
        self.session = GatewaySession("g", "i")

    def add(self, stream: bytes, epoch: int = 0, prompt: int = 10, key: int | None = None) -> None:
        base = make_submission(token_ids=[1] * prompt)
        tag = StreamTag(stream, epoch, b"")
        submission = Submission(base.stream_id, base.request, stream=tag)
        request = make_request(submission)
        request.key = key
        self.logs.add(self.session, request, submission)

    def after(self, seconds: float) -> None:
        self.clock.now += seconds
        self.logs.sweep()


def test_a_log_is_kept_after_its_request_has_ended() -> None:
    it = Logs()
    it.add(b"a", key=1)
    it.after(1000)
    it.logs.get(b"a").request.key = None
    it.after(2)
    it.after(KEEP_SECONDS - 1)
    assert it.logs.get(b"a")
    it.after(2)
    with pytest.raises(UnknownStream):
        it.logs.get(b"a")


def test_of_too_much_the_oldest_that_ended_goes_first() -> None:
    it = Logs(max_tokens=25)
    it.add(b"live", key=1)
    for stream in (b"a", b"b", b"c"):
        it.add(stream)
    it.after(2)
    assert it.logs.get(b"live") and it.logs.get(b"b") and it.logs.get(b"c")
    with pytest.raises(UnknownStream):
        it.logs.get(b"a")


def test_an_earlier_owners_request_does_not_replace_a_later_ones() -> None:
    it = Logs()
    it.add(b"a", epoch=2, prompt=30)
    it.add(b"a", epoch=1, prompt=20)
    assert len(it.logs.get(b"a").submission.request.token_ids) == 30
    it.add(b"a", epoch=3, prompt=40)
    assert len(it.logs.get(b"a").submission.request.token_ids) == 40


def test_nothing_is_kept_where_logs_are_off() -> None:
    it = Logs(keep_seconds=0)
    it.add(b"a")
    assert not len(it.logs)
