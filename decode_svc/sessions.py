"""Every gateway's requests on this worker, from acceptance to the acknowledged end.

Knows which gateway submitted a request, which ends were acknowledged, and how long a broken stream may stay broken.
Each request ends in exactly one terminal output, in whatever order results, cancellations, deadlines, broken streams
and the death of a rank occur.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from decode_svc.live import Live, LiveRequests, Ranks, RemotePrompts
from decode_svc.requests import Request, Terminal, make_request, terminal_of
from decode_svc.session import GatewayAttachment, GatewaySession
from decode_svc.stream_logs import StreamLog, StreamLogs
from engine.protocol.messages import Output, StepResult
from mesh.domain.requests import Submission
from mesh.domain.shares import Share
from mesh.errors import (
    DeadlineExceeded,
    EngineFailed,
    LeaseConflict,
    MeshError,
    Overloaded,
    StreamTaken,
    UnknownRequest,
)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds on what gateways make the worker keep, however many there are and whatever they do."""

    gateways: int = 256
    # Requests per gateway, including those that ended without acknowledgement.
    requests: int = 65_536
    # Tokens of prompts and answers kept for ended requests, so that clients can resume them.
    logged_tokens: int = 8_000_000


@dataclass(frozen=True, slots=True)
class RequestBacklog:
    """The load that admission considers."""

    live_requests: int
    # Prompt tokens that this worker must compute, over live requests that have no first token yet.
    queued_prefill_tokens: int
    # Output kept for the submitting gateway, in plain tokens.
    kept_tokens: int
    # The fraction of waiting requests that is served before one more request of the same tenant.
    ahead: float = 1.0


class GatewaySessions:
    """`clock` is monotonic, in seconds; a broken stream may be replaced within `grace_seconds`."""

    def __init__(
        self,
        ranks: Ranks,
        prompts: RemotePrompts,
        clock: Callable[[], float],
        grace_seconds: float,
        limits: SessionLimits | None = None,
        log_seconds: float = 0.0,
    ) -> None:
        # Set while no gateway is attached.
        self.alone = asyncio.Event()
        self.alone.set()
        self._live = LiveRequests(ranks, prompts, clock)
        self._clock = clock
        self._grace_seconds = grace_seconds
        self._limits = limits or SessionLimits()
        self._logs = StreamLogs(clock, log_seconds, self._limits.logged_tokens)
        self._sessions: dict[str, GatewaySession] = {}
        self._step = 0

    @property
    def idle(self) -> asyncio.Event:
        """Set while no request is live."""
        return self._live.idle

    @property
    def live_requests(self) -> int:
        return len(self._live)

    @property
    def kept_requests(self) -> int:
        """Requests that are live, or whose end is not acknowledged."""
        return sum(len(session.requests) for session in self._sessions.values())

    @property
    def attached_gateways(self) -> int:
        return sum(session.attachment is not None for session in self._sessions.values())

    def backlog(self, attachment: GatewayAttachment, share: Share) -> RequestBacklog:
        live = self._live
        ahead = live.census.ahead(share)
        return RequestBacklog(len(live), live.queued_prefill_tokens, attachment.session.kept_tokens, ahead)

    def attach(self, gateway_id: str, incarnation: str, resume: Mapping[int, int]) -> GatewayAttachment:
        """Begin a stream. `resume` gives, by stream id, the position of the first token that the gateway lacks.

        Raises Overloaded if there are too many gateways, or too many requests to resume. Raises LeaseConflict if
        another process with that id has a stream: two live gateways would cancel each other's requests for ever.
        """
        if len(resume) > self._limits.requests:
            raise Overloaded(f"at most {self._limits.requests} requests can be resumed")
        session = self._sessions.get(gateway_id)
        if session is not None and session.incarnation != incarnation:
            if session.attachment is not None:
                raise LeaseConflict(
                    f"another live gateway has the id {gateway_id!r}: give each gateway its own gateway_id"
                )
            self._drop_session(session)
            session = None
        if session is None:
            session = self._new_session(gateway_id, incarnation)
        replaced = session.attachment
        session.attachment, session.detached_at = GatewayAttachment(session), None
        self.alone.clear()
        if replaced is not None:
            replaced.wake()
        self._resume(session, resume)
        return session.attachment

    def detach(self, attachment: GatewayAttachment) -> None:
        """The stream ended: its requests live on for the grace period."""
        if not attachment.is_current:
            return
        session = attachment.session
        session.attachment, session.detached_at = None, self._clock()
        if not session.requests:
            del self._sessions[session.gateway_id]
        self._note_if_alone()

    def submit(self, attachment: GatewayAttachment, submission: Submission) -> None:
        """Submit a request to a rank. Raises as `refuse` does."""
        request = self._add(attachment, submission)
        self._logs.add(attachment.session, request, submission)
        try:
            self._live.submit(attachment.session, request, submission)
        except EngineFailed as error:
            self._end(attachment.session, request, error)

    def refuse(self, attachment: GatewayAttachment, submission: Submission, error: MeshError) -> None:
        """Answer a request with a failure, without involving a rank.

        Raises InvalidRequest if the stream id is in use, Overloaded if the gateway acknowledges nothing, and
        StreamReplaced if the stream is not the gateway's current one; each of these ends the stream.
        """
        self._end(attachment.session, self._add(attachment, submission), error)

    def cancel(self, attachment: GatewayAttachment, stream_id: int) -> None:
        """End a request. If it has ended, or never existed, nothing happens: the messages crossed."""
        attachment.check_current()
        request = attachment.session.requests.get(stream_id)
        if request is not None:
            self._live.cancel(request)

    def take(self, stream_id: bytes) -> StreamLog:
        """The log of a stream that continues elsewhere: a live request of it ends here. Raises UnknownStream."""
        log = self._logs.get(stream_id)
        if log.request.key is not None:
            self._live.cancel(log.request)
            self._end(log.session, log.request, StreamTaken("the client goes on with this answer through another call"))
        return log

    def acknowledge(self, attachment: GatewayAttachment, stream_ids: Iterable[int]) -> None:
        """Forget requests whose end the gateway has received."""
        attachment.check_current()
        requests = attachment.session.requests
        attachment.session.forget(
            [
                stream_id
                for stream_id in stream_ids
                if stream_id in requests and requests[stream_id].terminal is not None
            ]
        )

    def on_step(self, result: StepResult) -> None:
        """Add a step's output to the histories of its requests, and wake the streams that then have some to send."""
        self._step = result.step
        touched: dict[str, GatewaySession] = {}
        for output in result.outputs:
            live = self._live.get(output.key)
            if live is not None:
                self._keep(live, output)
                touched[live.session.gateway_id] = live.session
        for session in touched.values():
            session.wake()

    def on_first_token(self, first: Output) -> None:
        """A prefill worker drew a request's first token: send it out while the KV is still on the way."""
        live = self._live.get(first.key)
        if live is not None:
            self._live.go_on(first)
            self._keep(live, first)
            live.session.wake()

    def lose_prompt(self, key: int, error: MeshError) -> None:
        """The call to the prefill worker failed. A request past its first token has its KV, so it continues."""
        live = self._live.get(key)
        if live is not None and len(live.request.token_ids) <= 1:
            self._fail(live, error)

    def fail_all(self, error: MeshError) -> None:
        """A rank has died: every live request ends with `error`."""
        for live in self._live.all():
            self._end(live.session, live.request, error)

    def expire(self) -> None:
        """End requests past their deadline, and sessions past their grace. Call every few milliseconds."""
        for live in self._live.overdue():
            self._fail(live, DeadlineExceeded("the request's deadline passed"))
        self._logs.sweep()
        now = self._clock()
        for session in list(self._sessions.values()):
            if session.detached_at is not None and session.detached_at + self._grace_seconds <= now:
                self._drop_session(session)

    def end_streams(self, error: MeshError) -> None:
        """Let every stream deliver the output that is there, and then end with `error`."""
        for session in self._sessions.values():
            if session.attachment is not None:
                session.attachment.end(error)

    def _new_session(self, gateway_id: str, incarnation: str) -> GatewaySession:
        if len(self._sessions) >= self._limits.gateways:
            raise Overloaded(f"this worker serves at most {self._limits.gateways} gateways", retry_after_ms=10_000)
        session = self._sessions[gateway_id] = GatewaySession(gateway_id, incarnation)
        return session

    def _resume(self, session: GatewaySession, resume: Mapping[int, int]) -> None:
        session.restart_output()
        self._drop(session, [stream_id for stream_id in session.requests if stream_id not in resume])
        for stream_id, position in resume.items():
            request = session.requests.get(stream_id)
            if request is not None and not request.rewind(position):
                self._drop(session, [stream_id])
                request = None
            if request is None:
                request = Request(stream_id, attempt=0, prompt_tokens=position)
                session.add(request)
                error = UnknownRequest(f"this worker has no request {stream_id} that continues at position {position}")
                self._end(session, request, error)
            elif request.has_unsent:
                session.mark_unsent(request, self._step)

    def _add(self, attachment: GatewayAttachment, submission: Submission) -> Request:
        attachment.check_current()
        session = attachment.session
        if len(session.requests) >= self._limits.requests:
            raise Overloaded(f"{self._limits.requests} requests are not acknowledged: acknowledge those that ended")
        request = make_request(submission)
        session.add(request)
        return request

    def _keep(self, live: Live, output: Output) -> None:
        session, request = live.session, live.request
        if output.token_ids:
            if not request.token_ids:
                self._live.prompt_computed(request)
            kept = request.kept_tokens
            request.append(output)
            session.kept_tokens += request.kept_tokens - kept
            session.mark_unsent(request, self._step)
        terminal = terminal_of(request, output)
        if terminal is not None:
            self._end(session, request, terminal)

    def _fail(self, live: Live, error: MeshError) -> None:
        """End a request that a rank has."""
        self._live.cancel(live.request)
        self._end(live.session, live.request, error)

    def _end(self, session: GatewaySession, request: Request, terminal: Terminal) -> None:
        assert request.terminal is None
        self._live.release(request)
        request.terminal = terminal
        session.mark_unsent(request, self._step)
        session.wake()

    def _drop_session(self, session: GatewaySession) -> None:
        del self._sessions[session.gateway_id]
        replaced, session.attachment = session.attachment, None
        if replaced is not None:
            replaced.wake()
        self._note_if_alone()
        self._drop(session, list(session.requests))

    def _note_if_alone(self) -> None:
        if not self.attached_gateways:
            self.alone.set()

    def _drop(self, session: GatewaySession, stream_ids: Iterable[int]) -> None:
        """Forget requests and end those that run, without telling the gateway."""
        for request in session.forget(stream_ids):
            self._live.cancel(request)
            self._live.release(request)
