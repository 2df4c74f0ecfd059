"""Mesh errors on the wire: as a `Failure` message inside streams, and as google.rpc.Status at the end of a call."""

import grpc
from deepmesh.internal.v1 import failure_pb2
from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode

from mesh.errors import DOMAIN, DeadlineExceeded, EndpointUnavailable, MeshError, RemoteError, rebuild, shortened

STATUS_DETAILS_KEY = "grpc-status-details-bin"


def to_failure(error: MeshError) -> failure_pb2.Failure:
    """The error as the terminal message of one request."""
    return failure_pb2.Failure(
        code=_number(error.code),
        reason=error.reason,
        message=error.message,
        metadata=error.metadata,
        retry_after_ms=error.retry_after_ms,
    )


def from_failure(failure: failure_pb2.Failure) -> MeshError:
    """The error that was passed to `to_failure`, in its class if its reason has one here."""
    retry_after_ms = failure.retry_after_ms if failure.HasField("retry_after_ms") else None
    return rebuild(
        failure.reason,
        failure.message,
        code=_code(failure.code),
        metadata=failure.metadata,
        retry_after_ms=retry_after_ms,
    )


def to_status(error: MeshError) -> status_pb2.Status:
    """The error with ErrorInfo and, if it has a delay, RetryInfo."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    status = status_pb2.Status(code=_number(error.code), message=shortened(error.message), details=[_packed(info)])
    if error.retry_after_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(error.retry_after_ms)
        status.details.append(_packed(retry))
    return status


def from_rpc_error(error: grpc.aio.AioRpcError) -> MeshError:
    """The error that ended a call: the callee's own, or gRPC's for a broken connection or a missed deadline."""
    status = _rich_status(error)
    if status is None:
        return _plain(error.code(), error.details() or "the call failed")
    reason, metadata, retry_after_ms = error.code().name, {}, None
    for detail in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            retry_after_ms = retry.retry_delay.ToMilliseconds()
    return rebuild(reason, status.message, code=error.code(), metadata=metadata, retry_after_ms=retry_after_ms)


def _plain(code: StatusCode, message: str) -> MeshError:
    if code is StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(message)
    if code is StatusCode.CANCELLED:
        # The callee cancelled: a stopping server cancels its open calls. A cancellation of our own would not reach this
        # code.
        return EndpointUnavailable(f"the other side ended the call: {message}")
    return RemoteError(message, code=code, reason=code.name)


def _rich_status(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> Any:
    detail = Any()
    detail.Pack(message)
    return detail


def _number(code: StatusCode) -> int:
    number: int = code.value[0]
    return number


def _code(number: int) -> StatusCode:
    return next((code for code in StatusCode if _number(code) == number), StatusCode.UNKNOWN)
