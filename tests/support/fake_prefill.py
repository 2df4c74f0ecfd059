"""A prefill worker that says what a test tells it to, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from deepmesh.v1 import prefill_pb2, prefill_pb2_grpc

from decode_svc.requests import PrefillTarget
from mesh.config import ServerConfig
from mesh.errors import MeshError
from mesh.server import MeshServer, Registration
from tests.support.waiting import eventually
from transfer.ticket import SegmentDigest
from transfer.wire import digest_message


@dataclass
class FakePrefillCall:
    """One call, from its start on."""

    start: prefill_pb2.PrefillStart
    peer: str
    # Segments, in the order in which they were granted.
    grants: list[int] = field(default_factory=list)
    cancelled: bool = False
    answers: "asyncio.Queue[prefill_pb2.PrefillResponse | MeshError | None]" = field(default_factory=asyncio.Queue)

    def answer(self, **message: Any) -> None:
        self.answers.put_nowait(prefill_pb2.PrefillResponse(**message))

    def first_token(self, token_id: int = 42, **fields: Any) -> None:
        self.answer(first_token=prefill_pb2.PrefillFirstToken(token_id=token_id, **fields))

    def digest(self, digest: SegmentDigest) -> None:
        self.answer(digest=digest_message(digest))

    def end(self, error: MeshError | None = None) -> None:
        self.answers.put_nowait(error)


class FakePrefill(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self) -> None:
        self.calls: list[FakePrefillCall] = []
        self.endpoint = ""

    @property
    def target(self) -> PrefillTarget:
        return PrefillTarget("prefill-1", self.endpoint)

    async def call(self, index: int = 0) -> FakePrefillCall:
        """The call of that number, once it is there."""
        await eventually(lambda: len(self.calls) > index)
        return self.calls[index]

    async def Prefill(self, requests: Any, context: Any) -> Any:
        call = FakePrefillCall((await context.read()).start, context.peer())
        self.calls.append(call)
        reader = asyncio.create_task(self._read(call, context))
        try:
            while (answer := await call.answers.get()) is not None:
                if isinstance(answer, MeshError):
                    raise answer
                yield answer
        except asyncio.CancelledError:
            call.cancelled = True
            raise
        finally:
            reader.cancel()

    async def _read(self, call: FakePrefillCall, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            assert message.grant.transfer_id == call.start.ticket.transfer_id
            call.grants.append(message.grant.segment)


@asynccontextmanager
async def fake_prefill() -> AsyncIterator[FakePrefill]:
    servicer = FakePrefill()
    add = prefill_pb2_grpc.add_PrefillServiceServicer_to_server
    registration = Registration(add, servicer, "deepmesh.v1.PrefillService")
    async with MeshServer(ServerConfig(drain_seconds=0), "fake prefill", [registration]) as server:
        servicer.endpoint = server.endpoint
        yield servicer
