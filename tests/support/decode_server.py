"""A decode worker with a real rank on a loopback port, and a gateway's side of its stream."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from deepmesh.internal.v1 import decode_pb2, decode_pb2_grpc
from deepmesh.v1 import common_pb2

from decode_svc.__main__ import SERVES, SERVICE
from decode_svc.config import DecodeConfig
from decode_svc.prefill_link import PrefillLink
from decode_svc.service import DecodeServicer
from decode_svc.worker import DecodeWorker
from engine.oracle.tokens import oracle_tokens
from engine.protocol.messages import Ready
from mesh.domain.sampling import Sampling
from mesh.domain.targets import WorkerTarget
from mesh.domain.workers import WorkerRole
from mesh.errors import MeshError
from mesh.rpc.channel import Channels
from mesh.rpc.failures import from_failure, from_rpc_error
from mesh.rpc.server import MeshServer, Registration
from mesh.tls import server_tls
from tests.support.addresses import NOWHERE
from tests.support.fake_rank import TRANSFER_READY, FakeRankClient
from tests.support.forking import forked_services
from tests.support.waiting import PATIENCE_SECONDS, eventually
from worker.ranks.group import RankGroup
from worker.ranks.host import RankHost

VOCABULARY_SIZE = 1000
TOTAL_BLOCKS = 512


def decode_config(**changes: Any) -> DecodeConfig:
    """An oracle worker without a scheduler; `engine` and `queue` are merged into the defaults here."""
    engine = {"backend": "oracle", "total_blocks": TOTAL_BLOCKS, "max_requests": 32, **changes.pop("engine", {})}
    values = {
        "server": {"drain_seconds": 5},
        "scheduler": NOWHERE,
        "engine": engine,
        "grace_seconds": 1.0,
        "worker_id": "decode-1",
        **changes,
    }
    return DecodeConfig.model_validate(values)


class AnyTarget:
    """A registry that knows every prefill worker that a test names, until `forgets` is set."""

    def __init__(self) -> None:
        self.forgets = False

    async def check(self, target: WorkerTarget) -> None:
        pass

    def knows(self, target: WorkerTarget) -> bool:
        return not self.forgets


@dataclass
class RunningWorker:
    worker: DecodeWorker
    endpoint: str
    prefill_link: PrefillLink
    # Ends when the worker does, with the worker's error.
    following: asyncio.Task[None]
    # The fake in place of a real rank, if the worker has one.
    rank: FakeRankClient | None = None

    async def until_empty(self) -> None:
        """Wait until no request is kept, every block is free, and no transfer is open."""
        sessions, host = self.worker.sessions, self.worker.host
        report, total_blocks = host.report, host.ready.total_blocks
        await eventually(lambda: not sessions.kept_requests and report.load.free_blocks == total_blocks)
        await eventually(lambda: not self.worker.prefills.open_landings and not report.transfers.open_landings)


@asynccontextmanager
async def serving(config: DecodeConfig) -> AsyncIterator[tuple[DecodeServicer, MeshServer]]:
    servicer = DecodeServicer()
    add = decode_pb2_grpc.add_DecodeServiceServicer_to_server
    registration = Registration(add, servicer, SERVICE, ("Attach",), SERVES)
    async with MeshServer(config.server, "decode", [registration], server_tls(config.security.tls)) as server:
        yield servicer, server


@asynccontextmanager
async def running_worker(
    ranks: int = 1, prefill_link: PrefillLink | None = None, **changes: Any
) -> AsyncIterator[RunningWorker]:
    """A worker in this process with its ranks in others. Asserts at the end that it holds nothing.

    If the test killed a rank, it asserts that every request has ended.
    """
    changes["engine"] = {"parallel": {"dp": ranks}, **changes.get("engine", {})}
    config, prefill_link = decode_config(**changes), prefill_link or PrefillLink(Channels(), AnyTarget())
    async with serving(config) as (servicer, server):
        with forked_services():
            host = await RankHost.start(config, WorkerRole.DECODE, server.endpoint, Channels(), config.can_prefill)
        worker = DecodeWorker(config, host, prefill_link)
        try:
            servicer.open(worker)
            following = asyncio.create_task(worker.run())
            running = RunningWorker(worker, server.endpoint, prefill_link, following)
            yield running
            if following.done():
                assert not worker.live_requests
            else:
                await running.until_empty()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        finally:
            await prefill_link.close()
            await worker.host.close()


@asynccontextmanager
async def decode_without_rank(
    ready: Ready = TRANSFER_READY, prefill_link: PrefillLink | None = None, **changes: Any
) -> AsyncIterator[RunningWorker]:
    """A decode worker whose rank does what the test says. Asserts at the end that it keeps no request."""
    config, rank = decode_config(**changes), FakeRankClient(ready)
    link = prefill_link or PrefillLink(Channels(), AnyTarget())
    ranks = RankGroup([rank])  # type: ignore[list-item]
    async with serving(config) as (servicer, server):
        host = RankHost.of(ranks, config, WorkerRole.DECODE, server.endpoint, Channels(), config.can_prefill)
        worker = DecodeWorker(config, host, link)
        servicer.open(worker)
        following = asyncio.create_task(worker.run())
        yield RunningWorker(worker, server.endpoint, link, following, rank)
        await eventually(lambda: not worker.sessions.kept_requests and not worker.prefills.open_landings)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await link.close()


@dataclass
class ReceivedOutput:
    """One request as its gateway sees it."""

    prompt: list[int]
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    cached_tokens: int | None = None
    # How many of them came from host memory, and how many from stores.
    cached_by_tier: tuple[int, int] = (0, 0)
    finished: int | None = None
    error: MeshError | None = None

    @property
    def next_position(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def ended(self) -> bool:
        return self.finished is not None or self.error is not None

    def take(self, output: decode_pb2.RequestOutput) -> None:
        assert not self.ended, "an output after the end"
        assert output.first_position == self.next_position, "tokens out of place"
        self.tokens.extend(output.token_ids)
        self.logprobs.extend(output.logprobs)
        if output.HasField("cached_tokens"):
            assert self.cached_tokens is None
            self.cached_tokens = output.cached_tokens
            self.cached_by_tier = output.host_cached_tokens, output.store_cached_tokens
        if output.HasField("finished"):
            self.finished = output.finished
        elif output.HasField("failure"):
            self.error = from_failure(output.failure)

    def is_exact(self) -> bool:
        """Whether the tokens are those that the oracle's definition gives."""
        return self.tokens == oracle_tokens(self.prompt, len(self.tokens), VOCABULARY_SIZE, self.sampling)


class GatewayClient:
    """Speaks the gateway's side of Attach, and checks what it is told."""

    def __init__(self, channel: grpc.aio.Channel, gateway_id: str, incarnation: str) -> None:
        self.requests: dict[int, ReceivedOutput] = {}
        self.frames = 0
        self.welcome: decode_pb2.AttachWelcome
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._gateway_id, self._incarnation = gateway_id, incarnation
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._progress = asyncio.Event()
        self._next_stream_id = 0

    async def attach(self, *, reading: bool = True) -> Self:
        """Open a stream, resuming every request that has not ended."""
        live = {stream_id: request for stream_id, request in self.requests.items() if not request.ended}
        resume = [decode_pb2.ResumePoint(stream_id=s, next_position=r.next_position) for s, r in live.items()]
        hello = decode_pb2.AttachHello(
            gateway_id=self._gateway_id, gateway_incarnation=self._incarnation, resume=resume
        )
        self._call = self._stub.Attach()
        await self.send(hello=hello)
        if not reading:
            return self
        self.welcome = (await self._call.read()).welcome
        self._reader = asyncio.create_task(self._read(self._call))
        # Asyncio logs an error that no code reads when the collector frees the task. On Python 3.11 the traceback of
        # that log parses source, which breaks an `ast.parse` that is running then, as Hypothesis does at a test's start
        # ("AST constructor recursion depth mismatch").
        self._reader.add_done_callback(lambda reader: reader.cancelled() or reader.exception())
        return self

    async def send(self, **message: Any) -> None:
        await self._call.write(decode_pb2.AttachRequest(**message))

    async def submit(
        self, prompt: Sequence[int], max_tokens: int, sampling: Sampling | None = None, **fields: Any
    ) -> int:
        """Send a request; returns its stream id."""
        self._next_stream_id += 1
        stream_id, sampling = self._next_stream_id, sampling or Sampling()
        self.requests[stream_id] = ReceivedOutput(list(prompt), sampling)
        params = common_pb2.SamplingParams(
            temperature=sampling.temperature, seed=sampling.seed, top_logprobs=sampling.top_logprobs
        )
        submission = decode_pb2.Submission(
            stream_id=stream_id,
            request_id=f"r{stream_id}",
            token_ids=prompt,
            sampling=fields.pop("sampling_message", params),
            stop=fields.pop("stop", decode_pb2.StopConditions(max_tokens=max_tokens)),
            **fields,
        )
        await self.send(submission=submission)
        return stream_id

    async def until(self, condition: Any, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until `condition()` holds after some frame."""
        async with asyncio.timeout(seconds):
            while not condition():
                self._progress.clear()
                await self._progress.wait()

    async def ended(self, stream_id: int) -> ReceivedOutput:
        """Wait for a request's end and acknowledge it; returns the request."""
        request = self.requests[stream_id]
        await self.until(lambda: request.ended)
        await self.send(acknowledgement=decode_pb2.Acknowledgement(stream_ids=[stream_id]))
        return request

    async def break_stream(self) -> None:
        self._call.cancel()
        assert self._reader is not None
        await asyncio.wait({self._reader})

    async def stream_error(self) -> MeshError:
        """The error with which the worker ended the stream."""
        assert self._reader is not None
        try:
            await self._reader
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        raise AssertionError("the stream ended well")

    async def _read(self, call: Any) -> None:
        while (response := await call.read()) is not grpc.aio.EOF:
            self.frames += 1
            for output in response.frame.outputs:
                self.requests[output.stream_id].take(output)
            self._progress.set()


@asynccontextmanager
async def gateway_client(endpoint: str, gateway_id: str = "g", incarnation: str = "i") -> AsyncIterator[GatewayClient]:
    async with Channels().open(endpoint) as channel:
        yield await GatewayClient(channel, gateway_id, incarnation).attach()
