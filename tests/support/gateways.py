"""A whole gateway in the test's process: fake scheduler, fake decode workers, real loopback gRPC and HTTP.

With DEEPMESH_BEHIND_ENVOY in the environment, as in `make check-envoy`, clients reach it through a real Envoy.
"""

import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from deepmesh.internal.v1 import workers_pb2
from deepmesh.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

from deploy.envoy.bootstrap import Gateway as Peer
from gateway.catalog import ModelText, load_texts
from gateway.config import DispatchConfig, GatewayConfig, LimitsConfig, ModelConfig
from gateway.gateway import Gateway
from gateway.openai.http import application
from gateway.openai.server import HttpServer
from gateway.service import GatewayService
from mesh.rpc.channel import Channels
from mesh.rpc.server import MeshServer, Registration
from tests.support.envoy import HOST, running_envoy
from tests.support.fake_decode import FakeDecodeWorker
from tests.support.fake_scheduler import FakeScheduler
from tests.support.tokenizers import tokenizer_directory
from tests.support.waiting import PATIENCE_SECONDS, eventually

MODEL = "oracle"
BEHIND_ENVOY = bool(os.environ.get("DEEPMESH_BEHIND_ENVOY"))
# Marks tests of a gateway's own connections, or of answers for which Envoy sends the request again.
direct = pytest.mark.skipif(BEHIND_ENVOY, reason="the gateway's clients are Envoy's here")


@cache
def model_texts() -> dict[str, ModelText]:
    return load_texts([ModelConfig(tokenizer_dir=tokenizer_directory(), name=MODEL)])


@dataclass
class Mesh:
    """The parts that a test talks to and inspects."""

    gateway: Gateway
    scheduler: FakeScheduler
    scheduler_server: MeshServer
    workers: list[FakeDecodeWorker]
    stub: gateway_pb2_grpc.GatewayServiceStub
    http: httpx.AsyncClient
    grpc_port: int
    http_port: int
    stack: AsyncExitStack
    """Closes, before the servers, what a test adds to it."""

    @property
    def worker(self) -> FakeDecodeWorker:
        return self.workers[0]

    async def drained(self) -> None:
        """Wait until neither the gateway nor a worker has anything left of any request."""
        await eventually(lambda: self.gateway.dispatcher.live_generations == 0)
        await eventually(lambda: not any(self.gateway.links.live_streams().values()))
        await eventually(lambda: all(not worker.requests for worker in self.workers if worker.reachable))


@asynccontextmanager
async def running_mesh(
    *workers: FakeDecodeWorker,
    texts: dict[str, ModelText] | None = None,
    more_schedulers: Sequence[int] = (),
    **settings: Any,
) -> AsyncIterator[Mesh]:
    """Scheduler, workers (one by default) and gateway; asserts at the end that nothing is left of any request."""
    settings = {"dispatch": dispatch(), **settings}
    workers = workers or (FakeDecodeWorker(),)
    scheduler = FakeScheduler()
    async with AsyncExitStack() as stack:
        scheduler_server = scheduler.server()
        await stack.enter_async_context(scheduler_server)
        for worker in workers:
            await stack.enter_async_context(worker.started())
            scheduler.add(worker.identity())
        schedulers = ",".join(f"127.0.0.1:{port}" for port in (scheduler_server.port, *more_schedulers))
        config = GatewayConfig(scheduler=schedulers, **settings)
        gateway = await stack.enter_async_context(
            Gateway(config, model_texts() if texts is None else texts, Channels())
        )
        add = gateway_pb2_grpc.add_GatewayServiceServicer_to_server
        registration = Registration(add, GatewayService(gateway), "deepmesh.v1.GatewayService")
        # The page serves metrics.
        own = config.server.model_copy(update={"metrics_port": None, "drain_seconds": 0.2})
        server = await stack.enter_async_context(MeshServer(own, "gateway", [registration]))
        listening = HttpServer(
            config.http, application(gateway), drain_seconds=0.2, stalled_seconds=config.limits.stalled_seconds
        )
        http_server = await stack.enter_async_context(listening)
        await eventually(lambda: gateway.available)
        await server.ready()
        grpc_port, http_port = server.port, http_server.port
        if BEHIND_ENVOY:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            envoy = await stack.enter_async_context(running_envoy([Peer(HOST, grpc_port, http_port)], directory))
            grpc_port, http_port = envoy.listeners.grpc_port, envoy.listeners.http_port
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"{HOST}:{grpc_port}"))
        base = f"http://{HOST}:{http_port}"
        http = await stack.enter_async_context(
            # With verification the client would read the system's certificates, which takes time.
            httpx.AsyncClient(base_url=base, timeout=PATIENCE_SECONDS, trust_env=False, verify=False)
        )
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        mesh = Mesh(gateway, scheduler, scheduler_server, list(workers), stub, http, grpc_port, http_port, stack)
        yield mesh
        await mesh.drained()


def prefill_identity(worker_id: str = "prefill-0") -> workers_pb2.WorkerIdentity:
    """The identity of a prefill worker with the fake decode workers' kind of KV. Nothing listens at its endpoint."""
    return workers_pb2.WorkerIdentity(
        worker_id=worker_id,
        incarnation="first",
        role=workers_pb2.WORKER_ROLE_PREFILL,
        endpoint="127.0.0.1:1",
        slot_bytes=65536,
        model=MODEL,
        max_requests=64,
        can_prefill=True,
    )


def dispatch(**changes: Any) -> DispatchConfig:
    """Settings that retry soon, and wait long enough for a scheduler and for workers on a busy machine."""
    patient = {"answer_seconds": 30.0, "place_seconds": 30.0, "attach_seconds": 30.0}
    return DispatchConfig(**{"backoff_seconds": 0.01, "reattach_seconds": 0.02, **patient, **changes})


def limits(**changes: Any) -> LimitsConfig:
    return LimitsConfig(**changes)


def ids_request(
    token_ids: Sequence[int] = (5, 6, 7), max_tokens: int = 8, **fields: Any
) -> gateway_pb2.GenerateRequest:
    """A request with token ids as its prompt, which asks for token ids."""
    prompt = gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=token_ids))
    return gateway_pb2.GenerateRequest(prompt=prompt, max_tokens=max_tokens, return_token_ids=True, **fields)


def chat_request(content: str = "hello", role: str = "user", **fields: Any) -> gateway_pb2.GenerateRequest:
    chat = gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(role=role, content=content)])
    return gateway_pb2.GenerateRequest(prompt=gateway_pb2.Prompt(chat=chat), **{"max_tokens": 8, **fields})


@dataclass
class Collected:
    """One whole answer over gRPC."""

    started: gateway_pb2.GenerateStarted
    deltas: list[gateway_pb2.GenerateDelta]
    finished: gateway_pb2.GenerateFinished

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def reasoning(self) -> str:
        return "".join(delta.reasoning_text for delta in self.deltas)

    @property
    def usage(self) -> common_pb2.Usage:
        return self.finished.usage


async def collect(mesh: Mesh, request: gateway_pb2.GenerateRequest, **call: Any) -> Collected:
    """Collect every message of one call; asserts their order."""
    timeout = call.pop("timeout", PATIENCE_SECONDS)
    messages = [message async for message in mesh.stub.Generate(request, timeout=timeout, **call)]
    kinds = [message.WhichOneof("event") for message in messages]
    assert kinds == ["started", *["delta"] * (len(messages) - 2), "finished"]
    return Collected(messages[0].started, [message.delta for message in messages[1:-1]], messages[-1].finished)
