from typing import Any

import grpc
import pytest
from deepmesh.internal.v1 import failure_pb2
from google.rpc import error_details_pb2
from grpc import StatusCode
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import (
    MAX_TOLD_CHARACTERS,
    DeadlineExceeded,
    EndpointRefused,
    EndpointUnavailable,
    InvalidRequest,
    MeshError,
    Overloaded,
    RemoteError,
    Retry,
    UnknownModel,
)
from mesh.rpc.failures import (
    STATUS_DETAILS_KEY,
    from_failure,
    from_rpc_error,
    to_failure,
    to_status,
)


def rpc_error(code: StatusCode, message: str, details: bytes | None = None) -> grpc.aio.AioRpcError:
    trailing = [] if details is None else [(STATUS_DETAILS_KEY, details)]
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=message)


def all_errors() -> list[type[MeshError]]:
    pending: list[type[MeshError]] = [MeshError]
    found: list[type[MeshError]] = []
    while pending:
        error = pending.pop()
        pending.extend(error.__subclasses__())
        found.append(error)
    return [each for each in found if not issubclass(each, RemoteError)]


def test_every_reason_names_one_class() -> None:
    reasons = [each.reason for each in all_errors()]
    assert len(reasons) == len(set(reasons))


@pytest.mark.parametrize("error", all_errors(), ids=lambda each: each.__name__)
def test_a_failure_comes_back_as_the_class_it_left_as(error: type[MeshError]) -> None:
    arguments: dict[str, Any] = {"status": 502} if error is EndpointRefused else {}
    back = from_failure(to_failure(error("what happened", **arguments)))
    assert type(back) is error
    assert all(getattr(back, name) == value for name, value in arguments.items())
    assert back.message == "what happened"


@given(
    message=st.text(max_size=200),
    metadata=st.dictionaries(st.text(max_size=10), st.text(max_size=20), max_size=3),
    retry_after_ms=st.none() | st.integers(0, 2**31),
)
def test_a_failure_keeps_message_metadata_and_delay(
    message: str, metadata: dict[str, str], retry_after_ms: int | None
) -> None:
    back = from_failure(to_failure(Overloaded(message, metadata=metadata, retry_after_ms=retry_after_ms)))
    assert (back.message, back.metadata, back.retry_after_ms) == (message, metadata, retry_after_ms)


def test_a_refused_field_is_named_on_the_other_side() -> None:
    back = from_failure(to_failure(InvalidRequest("top_p is 2: give a number in (0, 1]", field="top_p")))
    assert back.metadata == {"field": "top_p"}


def test_an_unknown_reason_keeps_its_code_and_reason() -> None:
    back = from_failure(failure_pb2.Failure(code=8, reason="QUOTA", message="later", retry_after_ms=5))
    assert isinstance(back, RemoteError)
    assert (back.code, back.reason, back.retry_after_ms) == (StatusCode.RESOURCE_EXHAUSTED, "QUOTA", 5)


def test_a_known_reason_under_another_code_is_another_error() -> None:
    back = from_failure(failure_pb2.Failure(code=14, reason=UnknownModel.reason, message="?"))
    assert isinstance(back, RemoteError)
    assert back.code is StatusCode.UNAVAILABLE


def test_a_code_out_of_range_reads_as_unknown() -> None:
    assert from_failure(failure_pb2.Failure(code=99, reason="X")).code is StatusCode.UNKNOWN


def test_a_status_carries_error_info_and_retry_info() -> None:
    status = to_status(Overloaded("full", metadata={"waiting": "9"}, retry_after_ms=1500))
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info) and status.details[1].Unpack(retry)
    assert (info.domain, info.reason, dict(info.metadata)) == ("deepmesh", "OVERLOADED", {"waiting": "9"})
    assert retry.retry_delay.ToMilliseconds() == 1500


def test_an_error_that_persists_has_no_retry_info() -> None:
    assert len(to_status(UnknownModel("no")).details) == 1


def test_a_status_message_fits_in_headers() -> None:
    told = to_status(UnknownModel(f"no model {'x' * 100_000}: ask for another")).message
    assert len(told) == MAX_TOLD_CHARACTERS
    assert told.startswith("no model x") and told.endswith("x: ask for another")


def test_an_rpc_error_without_details_keeps_its_code() -> None:
    error = from_rpc_error(rpc_error(StatusCode.UNAVAILABLE, "connection refused"))
    assert (error.code, error.message) == (StatusCode.UNAVAILABLE, "connection refused")


def test_a_deadline_that_grpc_reports_is_our_deadline_error() -> None:
    assert isinstance(from_rpc_error(rpc_error(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")), DeadlineExceeded)


def test_a_call_that_a_stopping_server_cancelled_may_retry() -> None:
    error = from_rpc_error(rpc_error(StatusCode.CANCELLED, "CANCELLED"))
    assert isinstance(error, EndpointUnavailable)
    assert error.retry is Retry.THIS_CALL


def test_unreadable_details_are_read_as_none() -> None:
    error = from_rpc_error(rpc_error(StatusCode.NOT_FOUND, "nothing", b"\xff\xff\xff"))
    assert (error.code, error.reason, error.message) == (StatusCode.NOT_FOUND, "NOT_FOUND", "nothing")
