"""Logs of requests whose clients may return through another gateway: output is kept for a time after the request's
end.
"""

from collections.abc import Callable
from dataclasses import dataclass

from decode_svc.requests import Request
from decode_svc.session import GatewaySession
from mesh.domain.requests import Submission
from mesh.errors import UnknownStream

SWEEP_SECONDS = 1.0


@dataclass(slots=True)
class StreamLog:
    submission: Submission
    # Its history grows while a rank has it.
    request: Request
    session: GatewaySession
    # When the request was first seen without a rank, in seconds on the logs' clock.
    ended_at: float | None = None

    @property
    def kept_tokens(self) -> int:
        return len(self.submission.request.token_ids) + self.request.kept_tokens


class StreamLogs:
    """`clock` is monotonic, in seconds. At most `max_tokens` are kept for requests that have ended."""

    def __init__(self, clock: Callable[[], float], keep_seconds: float, max_tokens: int) -> None:
        self._clock = clock
        self._keep_seconds = keep_seconds
        self._max_tokens = max_tokens
        # By stream id, in the order of submission.
        self._logs: dict[bytes, StreamLog] = {}
        self._swept_at = clock()

    def __len__(self) -> int:
        return len(self._logs)

    def add(self, session: GatewaySession, request: Request, submission: Submission) -> None:
        """Keep the log of a request that can be resumed. If two owners submit the same stream, the later owner's log is
        kept.
        """
        if submission.stream is None or not self._keep_seconds:
            return
        known = self._logs.get(submission.stream.stream_id)
        if known is not None and known.submission.stream is not None:
            if known.submission.stream.epoch > submission.stream.epoch:
                return
            del self._logs[submission.stream.stream_id]
        self._logs[submission.stream.stream_id] = StreamLog(submission, request, session)

    def get(self, stream_id: bytes) -> StreamLog:
        """Raises UnknownStream."""
        log = self._logs.get(stream_id)
        if log is None:
            raise UnknownStream("this worker has no log of that stream")
        return log

    def sweep(self) -> None:
        """Forget logs whose time is over, and the oldest ones beyond the limit. Call it often."""
        now = self._clock()
        if now < self._swept_at + SWEEP_SECONDS:
            return
        self._swept_at = now
        kept = 0
        for stream_id, log in reversed(list(self._logs.items())):
            if log.request.key is not None:
                continue
            log.ended_at = now if log.ended_at is None else log.ended_at
            kept += log.kept_tokens
            if log.ended_at + self._keep_seconds <= now or kept > self._max_tokens:
                del self._logs[stream_id]
