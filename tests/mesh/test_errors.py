"""What errors say of themselves: what may be tried again, and which class a reason belongs to."""

import pytest
from grpc import StatusCode

from mesh.errors import (
    BodyTooLarge,
    ConfigError,
    DeadlineExceeded,
    GrammarSpent,
    InvalidRequest,
    MeshError,
    NoWorker,
    Overloaded,
    PrefillLost,
    RemoteError,
    Retry,
    StreamReplaced,
    Unauthenticated,
    UnknownModel,
    UnknownRequest,
    UnknownSession,
    WorkerFull,
    WorkerLost,
    rebuild,
)
from mesh.rpc.failures import from_failure, to_failure

RETRIES: dict[Retry, list[type[MeshError]]] = {
    Retry.THIS_CALL: [NoWorker, WorkerLost],
    Retry.HIGHER_UP: [WorkerFull, PrefillLost, GrammarSpent, StreamReplaced, UnknownRequest, UnknownSession],
    Retry.AFTER_DELAY: [Overloaded],
    Retry.NEVER: [
        MeshError,
        InvalidRequest,
        BodyTooLarge,
        UnknownModel,
        Unauthenticated,
        DeadlineExceeded,
        ConfigError,
    ],
}
CODES = [
    (StatusCode.UNAVAILABLE, Retry.THIS_CALL),
    (StatusCode.ABORTED, Retry.HIGHER_UP),
    (StatusCode.RESOURCE_EXHAUSTED, Retry.AFTER_DELAY),
    (StatusCode.FAILED_PRECONDITION, Retry.NEVER),
    (StatusCode.INTERNAL, Retry.NEVER),
]


@pytest.mark.parametrize(("error", "retry"), [(error, retry) for retry in RETRIES for error in RETRIES[retry]])
def test_a_class_keeps_its_retry_advice_over_the_wire(error: type[MeshError], retry: Retry) -> None:
    assert error.retry is retry
    assert from_failure(to_failure(error("x"))).retry is retry


@pytest.mark.parametrize(("code", "retry"), CODES)
def test_an_error_without_a_class_is_judged_by_its_code(code: StatusCode, retry: Retry) -> None:
    assert RemoteError("x", code=code, reason="SOMETHING_NEW").retry is retry


def test_a_reason_alone_names_the_class() -> None:
    error = rebuild("WORKER_FULL", "no room")
    assert (type(error), error.message, error.metadata, error.retry_after_ms) == (WorkerFull, "no room", {}, None)


def test_an_unknown_reason_is_an_internal_error_with_its_name() -> None:
    error = rebuild("SOMETHING_NEW", "what")
    assert type(error) is RemoteError
    assert (error.code, error.reason, error.message) == (StatusCode.INTERNAL, "SOMETHING_NEW", "what")
