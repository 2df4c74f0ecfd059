"""Messages that no service means: each call ends with an error that says whose fault it is, and nothing is logged."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from deepmesh.internal.v1 import kvstore_pb2, scheduler_pb2
from deepmesh.v1 import gateway_pb2
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.__main__ import running_store
from tests.support.gateways import running_mesh
from tests.support.scheduler_server import running_scheduler
from tests.support.store_agent import FakeAgents
from tests.support.stores import store_config

# What only we can cause.
OURS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
CALL_SECONDS = 0.3
# 12 of each service in `make test`, 625 in `make soak`.
CALLS = settings(max_examples=settings().max_examples // 8)
INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
NAMES = st.sampled_from(["", "oracle", "r", "a\nb", "é" * 300]) | st.text(max_size=20)


def values(field: Any, depth: int) -> st.SearchStrategy[Any]:
    if field.cpp_type in INTEGERS:
        low, high = INTEGERS[field.cpp_type]
        return st.sampled_from([0, 1, low, high]) | st.integers(low, high)
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return st.floats(width=32)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_STRING:
        return NAMES
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=40) | st.binary(min_size=16, max_size=16)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return st.sampled_from([each.number for each in field.enum_type.values]) | st.integers(0, 99)
    return messages(GetMessageClass(field.message_type), depth + 1)


@st.composite
def messages(draw: st.DrawFn, message_class: type[Message], depth: int = 0) -> Message:
    """Some fields set, to anything of their type."""
    message = message_class()
    for field in message_class.DESCRIPTOR.fields:
        # Maps are lists of entries.
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if is_map or depth > 3 or draw(st.booleans()):
            continue
        if field.is_repeated:
            for value in draw(st.lists(values(field, depth), max_size=3)):
                added = getattr(message, field.name)
                added.append(value)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(draw(values(field, depth)))
        else:
            setattr(message, field.name, draw(values(field, depth)))
    return message


def call(channel: grpc.Channel, method: MethodDescriptor, content: bytes) -> None:
    path = f"/{method.containing_service.full_name}/{method.name}"
    kind = ("stream" if method.client_streaming else "unary") + "_" + ("stream" if method.server_streaming else "unary")
    sent: Any = iter([content]) if method.client_streaming else content
    try:
        answer = getattr(channel, kind)(path)(sent, timeout=CALL_SECONDS)
        if method.server_streaming:
            for _ in answer:
                answer.cancel()
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        assert error.code() not in OURS, (path, error.details())


def fuzz(endpoint: str, service: ServiceDescriptor) -> None:
    inputs = [(method, GetMessageClass(method.input_type)) for method in service.methods]

    @CALLS
    @given(st.sampled_from(inputs).flatmap(lambda each: st.tuples(st.just(each[0]), messages(each[1]))))
    def any_fields(asked: tuple[MethodDescriptor, Message]) -> None:
        call(channel, asked[0], asked[1].SerializeToString())

    @CALLS
    @given(st.sampled_from(list(service.methods)), st.binary(max_size=100))
    def any_bytes(method: MethodDescriptor, content: bytes) -> None:
        call(channel, method, content)

    with grpc.insecure_channel(endpoint, [("grpc.enable_http_proxy", 0)]) as channel:
        any_fields()
        any_bytes()


@asynccontextmanager
async def gateway() -> AsyncIterator[str]:
    async with running_mesh() as mesh:
        yield f"127.0.0.1:{mesh.grpc_port}"


@asynccontextmanager
async def scheduler() -> AsyncIterator[str]:
    async with running_scheduler() as endpoint:
        yield endpoint


@asynccontextmanager
async def kvstore() -> AsyncIterator[str]:
    async with running_store(store_config(), FakeAgents()) as server:
        yield server.endpoint


@pytest.mark.hypothesis
@pytest.mark.parametrize(
    ("service", "running"), [(gateway_pb2, gateway), (scheduler_pb2, scheduler), (kvstore_pb2, kvstore)]
)
async def test_whatever_comes_ends_with_an_error_that_is_not_ours(
    service: Any, running: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (descriptor,) = service.DESCRIPTOR.services_by_name.values()
    async with running() as endpoint:
        await asyncio.to_thread(fuzz, endpoint, descriptor)
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
