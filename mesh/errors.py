"""The one tree of errors. Each class has a gRPC code, a stable reason, and what its caller may retry.

Interceptors translate errors at the edges. `rebuild` is the only way back from a reason to its class.
"""

from collections.abc import Mapping
from enum import Enum
from functools import cache
from types import MappingProxyType

from grpc import StatusCode

DOMAIN = "deepmesh"
# Messages travel in headers, which are limited to a few KiB, and may quote a request of megabytes.
MAX_TOLD_CHARACTERS = 1000
_CUT = " … "


def shortened(text: str, characters: int = MAX_TOLD_CHARACTERS) -> str:
    """Text with its middle cut out if it is too long: the beginning says what is wrong, the end what to do."""
    if len(text) <= characters:
        return text
    end = characters // 3
    return f"{text[: characters - end - len(_CUT)]}{_CUT}{text[-end:]}"


class Retry(Enum):
    """What may be retried after an error."""

    # The callee did nothing, or is not there: make the same call again, to it or to another like it.
    THIS_CALL = "this call"
    # Repeat the step above: place the request again, attach again, open another landing.
    HIGHER_UP = "higher up"
    # Make the same call again, once there is room.
    AFTER_DELAY = "after a delay"
    # Nothing: the call would fail again, or might.
    NEVER = "never"

    @classmethod
    def of(cls, code: StatusCode) -> "Retry":
        """What a code means in deepmesh's contracts."""
        return _RETRIES.get(code, cls.NEVER)


_RETRIES: Mapping[StatusCode, Retry] = MappingProxyType(
    {
        StatusCode.UNAVAILABLE: Retry.THIS_CALL,
        StatusCode.ABORTED: Retry.HIGHER_UP,
        StatusCode.RESOURCE_EXHAUSTED: Retry.AFTER_DELAY,
    }
)


class MeshError(Exception):
    """An error with a meaning across the wire.

    `metadata` becomes ErrorInfo.metadata, `retry_after_ms` becomes RetryInfo. A class that sets no `retry` gets that of
    its code.
    """

    code: StatusCode = StatusCode.INTERNAL
    reason: str = "INTERNAL"
    retry: Retry = Retry.NEVER

    def __init_subclass__(cls) -> None:
        if "code" in vars(cls) and "retry" not in vars(cls):
            cls.retry = Retry.of(cls.code)

    def __init__(
        self, message: str, *, metadata: Mapping[str, str] | None = None, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after_ms = retry_after_ms


class InvalidRequest(MeshError):
    """The request can never succeed. `field` names the wrong field, if it is a field."""

    code = StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message, metadata={"field": field} if field else None)


class UnknownField(InvalidRequest):
    """The request has a field that requests of its kind do not have."""

    reason = "UNKNOWN_FIELD"


class MissingField(InvalidRequest):
    """The request lacks a required field."""

    reason = "MISSING_FIELD"


class WrongType(InvalidRequest):
    """A field's value has the wrong type."""

    reason = "WRONG_TYPE"


class Unsupported(InvalidRequest):
    """The request asks for a feature that clients of this API know and that we lack."""

    reason = "UNSUPPORTED"


class InvalidConstraint(InvalidRequest):
    """The answer cannot be constrained as asked: the grammar is invalid, or takes too long."""

    reason = "INVALID_CONSTRAINT"


class ContextExceeded(InvalidRequest):
    """Prompt and completion do not fit the model's context."""

    reason = "CONTEXT_EXCEEDED"


class BodyTooLarge(InvalidRequest):
    """The request's body is larger than the limit."""

    reason = "BODY_TOO_LARGE"


class UnsupportedCoding(InvalidRequest):
    """The request's body is compressed."""

    reason = "UNSUPPORTED_CODING"


class Unauthenticated(MeshError):
    """The call carries no API key, or an unknown one."""

    code = StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDenied(MeshError):
    """The caller's certificate does not allow this call, or names another service than the caller claims to be."""

    code = StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class UnknownModel(MeshError):
    """No worker serves, or has lately served, that model."""

    code = StatusCode.NOT_FOUND
    reason = "UNKNOWN_MODEL"


class UnknownRequest(MeshError):
    """The worker does not know that request, because it restarted or the grace period ended: place it again."""

    code = StatusCode.NOT_FOUND
    reason = "UNKNOWN_REQUEST"
    retry = Retry.HIGHER_UP


class Overloaded(MeshError):
    """The mesh is full: retry after the delay."""

    code = StatusCode.RESOURCE_EXHAUSTED
    reason = "OVERLOADED"


class SlowClient(MeshError):
    """The client did not read its stream: its buffer filled up and the request was cancelled."""

    code = StatusCode.RESOURCE_EXHAUSTED
    reason = "SLOW_CLIENT"


class PlaceAgain(MeshError):
    """This worker has no room, or is draining: another may have room."""

    code = StatusCode.ABORTED
    reason = "PLACE_AGAIN"


class WorkerFull(PlaceAgain):
    """This worker's queue is full."""

    reason = "WORKER_FULL"


class WorkerDraining(PlaceAgain):
    """This worker finishes its requests and takes no new ones."""

    reason = "DRAINING"


class GrammarSpent(PlaceAgain):
    """Another answer made the lexer that both share too complex. The request can continue with a newly compiled
    grammar.
    """

    reason = "GRAMMAR_SPENT"


class NamespaceMismatch(MeshError):
    """KV of other weights, another dtype or another layout: its bytes have another meaning here and are never mixed."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "NAMESPACE_MISMATCH"


class PrefillLost(PlaceAgain):
    """The prefill worker refused the prompt, died, or sent no KV in time. `worker_id` in the metadata names it."""

    reason = "PREFILL_LOST"


class PushFailed(PlaceAgain):
    """A prompt was computed, but its KV did not reach the landing."""

    reason = "PUSH_FAILED"


class StreamReplaced(MeshError):
    """The same gateway opened another stream, which replaced this one."""

    code = StatusCode.ABORTED
    reason = "STREAM_REPLACED"


class UnknownStream(MeshError):
    """No stream has that name, its token has expired, or it belongs to another tenant."""

    code = StatusCode.NOT_FOUND
    reason = "UNKNOWN_STREAM"


class StreamGone(MeshError):
    """No worker has the stream's log any more: only the request itself can continue it."""

    code = StatusCode.NOT_FOUND
    reason = "STREAM_GONE"


class StreamTaken(MeshError):
    """The client resumed the stream by another call, which ended this one."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "STREAM_TAKEN"


class NoWorker(MeshError):
    """No live worker serves the model now."""

    code = StatusCode.UNAVAILABLE
    reason = "NO_WORKER"


class NoWorkerYet(NoWorker):
    """A scheduler that started less than a lease ago finds no worker, but may not know all of them yet."""

    reason = "NO_WORKER_YET"


class WorkerLost(MeshError):
    """The worker died and the request could not be continued elsewhere."""

    code = StatusCode.UNAVAILABLE
    reason = "WORKER_LOST"


class SchedulerUnavailable(MeshError):
    """The scheduler cannot be reached and the last snapshot is too old."""

    code = StatusCode.UNAVAILABLE
    reason = "SCHEDULER_UNAVAILABLE"


class EndpointUnavailable(MeshError):
    """The endpoint that a client was given does not answer, or is not the expected service."""

    code = StatusCode.UNAVAILABLE
    reason = "ENDPOINT_UNAVAILABLE"


class EndpointRefused(EndpointUnavailable):
    """An HTTP endpoint answered with an error status."""

    reason = "ENDPOINT_REFUSED"

    def __init__(self, message: str, *, status: int, retry_after_ms: int | None = None) -> None:
        super().__init__(message, metadata={"status": str(status)}, retry_after_ms=retry_after_ms)

    @property
    def status(self) -> int:
        """The HTTP status."""
        return int(self.metadata["status"])


class AnswerBroken(EndpointUnavailable):
    """An endpoint's answer is malformed, or reports an error after it has begun."""

    reason = "ANSWER_BROKEN"


class AnswerIncomplete(AnswerBroken):
    """A streamed answer ended without its end marker."""

    reason = "ANSWER_INCOMPLETE"


class ShuttingDown(MeshError):
    """The service is stopping."""

    code = StatusCode.UNAVAILABLE
    reason = "SHUTTING_DOWN"


class DeadlineExceeded(MeshError):
    """The request's deadline passed."""

    code = StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class LeaseConflict(MeshError):
    """Another live process holds that id."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "LEASE_CONFLICT"


class LeaseExpired(MeshError):
    """A status stream outlived its lease, or another stream replaced it: begin again with identity and a snapshot."""

    code = StatusCode.ABORTED
    reason = "LEASE_EXPIRED"


class ConfigError(MeshError):
    """The configuration is wrong; the service does not start."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "CONFIG"


class CheckpointError(MeshError):
    """The checkpoint cannot be served: a missing shard, a wrong shape, an unsupported architecture."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "CHECKPOINT"


class EngineFailed(MeshError):
    """The engine process ended."""

    code = StatusCode.UNAVAILABLE
    reason = "ENGINE_FAILED"


class RankLost(EngineFailed):
    """A rank waited for another rank of its worker, which has ended or hangs."""

    reason = "RANK_LOST"


class RemoteError(MeshError):
    """An error of another process that has no class here. It keeps its code and reason, and its code decides what may
    be retried.
    """

    def __init__(
        self,
        message: str,
        *,
        code: StatusCode,
        reason: str,
        metadata: Mapping[str, str] | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message, metadata=metadata, retry_after_ms=retry_after_ms)
        self.code = code
        self.reason = reason
        self.retry = Retry.of(code)


class ProcessFailed(MeshError):
    """A service's process ended, or was not ready in time."""

    code = StatusCode.UNAVAILABLE
    reason = "PROCESS_FAILED"


class UnknownSession(MeshError):
    """The KV store does not know that session, because it restarted or the lease ran out: attach again."""

    code = StatusCode.NOT_FOUND
    reason = "UNKNOWN_SESSION"
    retry = Retry.HIGHER_UP


class UnknownTransfer(MeshError):
    """That session has no landing with that transfer id: the landing has ended, or never existed."""

    code = StatusCode.NOT_FOUND
    reason = "UNKNOWN_TRANSFER"


class OfferFailed(MeshError):
    """Offered blocks did not reach the KV store; they may be offered again."""

    code = StatusCode.ABORTED
    reason = "OFFER_FAILED"


class IndexUnavailable(MeshError):
    """The shared index of the KV stores does not answer."""

    code = StatusCode.UNAVAILABLE
    reason = "INDEX_UNAVAILABLE"


class ResponsesUnavailable(MeshError):
    """The store of responses does not answer."""

    code = StatusCode.UNAVAILABLE
    reason = "RESPONSES_UNAVAILABLE"


class UnknownResponse(MeshError):
    """The caller's tenant has no stored response of that id."""

    code = StatusCode.NOT_FOUND
    reason = "RESPONSE_NOT_FOUND"


class PreviousResponseNotFound(InvalidRequest):
    """The request continues from a response that is not stored, or that belongs to another tenant."""

    reason = "PREVIOUS_RESPONSE_NOT_FOUND"


def rebuild(
    reason: str,
    message: str,
    *,
    code: StatusCode | None = None,
    metadata: Mapping[str, str] | None = None,
    retry_after_ms: int | None = None,
) -> MeshError:
    """The error that another process raised, in its class here.

    RemoteError if the reason has no class here, or came with another code than its class has. `code` is None if only
    the reason was sent; an unknown reason then counts as INTERNAL, since nothing says what it means.
    """
    known = _classes().get(reason)
    if known is None or code not in (None, known.code):
        return RemoteError(
            message,
            code=StatusCode.INTERNAL if code is None else code,
            reason=reason,
            metadata=metadata,
            retry_after_ms=retry_after_ms,
        )
    # Bypass the subclass's constructor: its arguments are already in the metadata.
    error = known.__new__(known)
    MeshError.__init__(error, message, metadata=metadata, retry_after_ms=retry_after_ms)
    return error


@cache
def _classes() -> Mapping[str, type[MeshError]]:
    """All classes of the tree by reason."""
    pending: list[type[MeshError]] = [MeshError]
    classes: dict[str, type[MeshError]] = {}
    while pending:
        error = pending.pop()
        pending.extend(error.__subclasses__())
        if error is not RemoteError:
            classes.setdefault(error.reason, error)
    return classes
