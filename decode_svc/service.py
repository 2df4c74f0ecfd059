"""DecodeService: one stream for each gateway, read and written at the same time."""

# grpc's classes are generic only in their stubs.
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
from deepmesh.internal.v1 import decode_pb2, decode_pb2_grpc

from decode_svc import wire
from decode_svc.session import GatewayAttachment
from decode_svc.worker import DecodeWorker
from mesh.domain import wire as domain_wire
from mesh.errors import InvalidRequest, NoWorker
from mesh.rpc.identity import PROCESS_SEPARATOR, check_claim

HELLO_SECONDS = 10.0


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Serves nothing until `open`: the process is alive already while the model loads."""

    def __init__(self) -> None:
        self._worker: DecodeWorker | None = None

    def open(self, worker: DecodeWorker) -> None:
        self._worker = worker

    async def Attach(
        self,
        request_iterator: AsyncIterator[decode_pb2.AttachRequest],
        context: grpc.aio.ServicerContext[decode_pb2.AttachRequest, decode_pb2.AttachResponse],
    ) -> AsyncIterator[decode_pb2.AttachResponse]:
        worker = self._worker
        if worker is None:
            raise NoWorker("this worker is still loading its model: retry")
        hello = await _hello(request_iterator)
        check_claim("hello.gateway_id", hello.gateway_id.partition(PROCESS_SEPARATOR)[0])
        attachment = worker.sessions.attach(hello.gateway_id, hello.gateway_incarnation, wire.resume_points(hello))
        reader = asyncio.create_task(_read(worker, attachment, request_iterator))
        try:
            yield wire.welcome(worker.host.identity, worker.grace_seconds)
            while (frame := await attachment.next_frame()) is not None:
                yield wire.step_frame(frame)
            await reader
        finally:
            worker.sessions.detach(attachment)
            reader.cancel()
            # An error of the reader was either raised above already, or gives way to the error that was.
            await asyncio.gather(reader, return_exceptions=True)

    async def TakeStream(
        self,
        request: decode_pb2.TakeStreamRequest,
        context: grpc.aio.ServicerContext[decode_pb2.TakeStreamRequest, decode_pb2.TakeStreamResponse],
    ) -> decode_pb2.TakeStreamResponse:
        if self._worker is None:
            raise NoWorker("this worker is still loading its model: retry")
        return wire.taken_stream(self._worker.sessions.take(request.stream_id))


async def _hello(requests: AsyncIterator[decode_pb2.AttachRequest]) -> decode_pb2.AttachHello:
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            request = await anext(requests, None)
    except TimeoutError as error:
        raise InvalidRequest(f"no hello within {HELLO_SECONDS:g} s of the call") from error
    if request is None or request.WhichOneof("message") != "hello":
        raise InvalidRequest("the first message of the stream must be hello", field="hello")
    wire.check_hello(request.hello)
    return request.hello


async def _read(
    worker: DecodeWorker, attachment: GatewayAttachment, requests: AsyncIterator[decode_pb2.AttachRequest]
) -> None:
    """Handle the gateway's messages; the end of this ends the stream."""
    try:
        async for request in requests:
            _handle(worker, attachment, request)
    finally:
        attachment.end()


def _handle(worker: DecodeWorker, attachment: GatewayAttachment, request: decode_pb2.AttachRequest) -> None:
    kind = request.WhichOneof("message")
    if kind == "submission":
        worker.submit(attachment, domain_wire.submission(request.submission))
    elif kind == "acknowledgement":
        worker.sessions.acknowledge(attachment, request.acknowledgement.stream_ids)
    elif kind == "cancellation":
        worker.sessions.cancel(attachment, request.cancellation.stream_id)
    elif kind == "hello":
        raise InvalidRequest("a stream has one hello, its first message", field="hello")
