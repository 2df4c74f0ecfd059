"""The one tree of errors. Each class names its gRPC code and its stable reason; interceptors translate at the edges."""

from collections.abc import Mapping

from grpc import StatusCode

DOMAIN = "deepmesh"


class MeshError(Exception):
    """An error with a meaning across the wire.

    `metadata` becomes ErrorInfo.metadata, `retry_after_ms` becomes RetryInfo.
    """

    code: StatusCode = StatusCode.INTERNAL
    reason: str = "INTERNAL"

    def __init__(
        self, message: str, *, metadata: Mapping[str, str] | None = None, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after_ms = retry_after_ms


class InvalidRequest(MeshError):
    """The request can never succeed. `field` names the offending field where there is one."""

    code = StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message, metadata={"field": field} if field else None)


class ContextExceeded(InvalidRequest):
    """Prompt and completion do not fit the model's context."""

    reason = "CONTEXT_EXCEEDED"


class BodyTooLarge(InvalidRequest):
    """The request's body is over the limit; it was not kept."""

    reason = "BODY_TOO_LARGE"


class Unauthenticated(MeshError):
    """The call carries no API key that is known here."""

    code = StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class UnknownModel(MeshError):
    """No worker ever served that model."""

    code = StatusCode.NOT_FOUND
    reason = "UNKNOWN_MODEL"


class UnknownRequest(MeshError):
    """The worker does not know that request (it restarted, or the grace period ended)."""

    code = StatusCode.NOT_FOUND
    reason = "UNKNOWN_REQUEST"


class Overloaded(MeshError):
    """The mesh is full: retry after the delay."""

    code = StatusCode.RESOURCE_EXHAUSTED
    reason = "OVERLOADED"


class SlowClient(MeshError):
    """The client did not read its stream; its buffer filled and the request was cancelled."""

    code = StatusCode.RESOURCE_EXHAUSTED
    reason = "SLOW_CLIENT"


class PlaceAgain(MeshError):
    """This worker has no room or is draining: another may have."""

    code = StatusCode.ABORTED
    reason = "PLACE_AGAIN"


class WorkerFull(PlaceAgain):
    """This worker's queue is full."""

    reason = "WORKER_FULL"


class WorkerDraining(PlaceAgain):
    """This worker finishes what it has and takes nothing new."""

    reason = "DRAINING"


class NamespaceMismatch(MeshError):
    """KV of other weights, of another dtype or layout: its bytes mean something else here, and are never mixed."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "NAMESPACE_MISMATCH"


class PrefillLost(PlaceAgain):
    """The prefill worker refused the prompt, died, or sent no KV in time. Its id is metadata's `worker_id`."""

    reason = "PREFILL_LOST"


class PushFailed(PlaceAgain):
    """A prompt was computed, and its KV did not reach the landing."""

    reason = "PUSH_FAILED"


class StreamReplaced(MeshError):
    """The same gateway opened another stream; this one is over."""

    code = StatusCode.ABORTED
    reason = "STREAM_REPLACED"


class NoWorker(MeshError):
    """No live worker serves the model now."""

    code = StatusCode.UNAVAILABLE
    reason = "NO_WORKER"


class WorkerLost(MeshError):
    """The worker died and the request could not be continued elsewhere."""

    code = StatusCode.UNAVAILABLE
    reason = "WORKER_LOST"


class SchedulerUnavailable(MeshError):
    """The scheduler cannot be reached and the last snapshot is too old."""

    code = StatusCode.UNAVAILABLE
    reason = "SCHEDULER_UNAVAILABLE"


class EndpointUnavailable(MeshError):
    """What a client was pointed at does not answer, or is something else."""

    code = StatusCode.UNAVAILABLE
    reason = "ENDPOINT_UNAVAILABLE"


class EndpointRefused(EndpointUnavailable):
    """An HTTP endpoint answered with the status of an error."""

    reason = "ENDPOINT_REFUSED"

    def __init__(self, message: str, *, status: int, retry_after_ms: int | None = None) -> None:
        super().__init__(message, metadata={"status": str(status)}, retry_after_ms=retry_after_ms)
        self.status = status


class AnswerBroken(EndpointUnavailable):
    """An endpoint's answer is malformed, or tells of an error after it has begun."""

    reason = "ANSWER_BROKEN"


class AnswerIncomplete(AnswerBroken):
    """A streamed answer ended without saying that it was complete."""

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
    """Another live process holds that worker id."""

    code = StatusCode.FAILED_PRECONDITION
    reason = "LEASE_CONFLICT"


class LeaseExpired(MeshError):
    """A status stream outlived its lease, or another stream took it: begin again with identity and a snapshot."""

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


class RemoteError(MeshError):
    """An error of another process that has no class here: its code and reason are kept as they came."""

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


class ProcessFailed(MeshError):
    """A service's process ended, or did not become ready in time."""

    code = StatusCode.UNAVAILABLE
    reason = "PROCESS_FAILED"


class UnknownSession(MeshError):
    """The KV store knows no such session (it restarted, or the lease ran out): attach again."""

    code = StatusCode.NOT_FOUND
    reason = "UNKNOWN_SESSION"


class UnknownTransfer(MeshError):
    """No landing with that transfer id, or none of that session: it ended, or never was."""

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
