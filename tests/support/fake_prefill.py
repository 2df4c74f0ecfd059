"""A prefill worker that answers as a test says, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from deepmesh.internal.v1 import prefill_pb2, prefill_pb2_grpc

from mesh.config import ServerConfig
from mesh.domain.targets import WorkerTarget
from mesh.errors import MeshError
from mesh.rpc.server import MeshServer, Registration
from tests.support.waiting import eventually


@dataclass
class FakePrefillCall:
    request: prefill_pb2.PrefillRequest
    peer: str
    cancelled: bool = False
    answers: "asyncio.Queue[prefill_pb2.PrefillResponse | MeshError | None]" = field(default_factory=asyncio.Queue)

    def answer(self, **message: Any) -> None:
        self.answers.put_nowait(prefill_pb2.PrefillResponse(**message))

    def first_token(self, token_id: int = 42, **fields: Any) -> None:
        self.answer(first_token=prefill_pb2.PrefillFirstToken(token_id=token_id, **fields))

    def end(self, error: MeshError | None = None) -> None:
        self.answers.put_nowait(error)


class FakePrefill(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self) -> None:
        self.calls: list[FakePrefillCall] = []
        self.endpoint = ""

    @property
    def target(self) -> WorkerTarget:
        return WorkerTarget("prefill-1", "first", self.endpoint)

    async def call(self, index: int = 0) -> FakePrefillCall:
        """Wait for the call with that index; returns it."""
        await eventually(lambda: len(self.calls) > index)
        return self.calls[index]

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> Any:
        call = FakePrefillCall(request, context.peer())
        self.calls.append(call)
        try:
            while (answer := await call.answers.get()) is not None:
                if isinstance(answer, MeshError):
                    raise answer
                yield answer
        except asyncio.CancelledError:
            call.cancelled = True
            raise


@asynccontextmanager
async def fake_prefill() -> AsyncIterator[FakePrefill]:
    servicer = FakePrefill()
    add = prefill_pb2_grpc.add_PrefillServiceServicer_to_server
    registration = Registration(add, servicer, "deepmesh.internal.v1.PrefillService")
    async with MeshServer(ServerConfig(drain_seconds=0), "fake prefill", [registration]) as server:
        servicer.endpoint = server.endpoint
        yield servicer
