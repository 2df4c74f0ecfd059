"""Many endless streams read at once: the client's side of the relay bench, the same for every endpoint."""

import asyncio
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

import grpc
from deepmesh.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

from mesh.errors import EndpointUnavailable
from mesh.rpc.channel import OPTIONS
from mesh.rpc.failures import from_rpc_error

PROMPT_TOKENS = 16
# More tokens than any measurement takes.
MAX_TOKENS = 100_000
FIRST_TOKENS_SECONDS = 120.0
POLL_SECONDS = 0.02


def prompt_of(index: int) -> list[int]:
    """Token ids of a prompt; no other index has a prompt with this beginning."""
    return [100 + index // 100, *range(100 + index % 100, 100 + index % 100 + PROMPT_TOKENS)]


def endless_request(index: int) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        prompt=gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=prompt_of(index))),
        sampling=common_pb2.SamplingParams(temperature=0.0),
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
    )


class TokenStreams(ABC):
    """`count` endless streams, open until the block ends.

    `times[i]`: when each token of stream i arrived, in seconds of time.perf_counter; tokens of a message share a time.
    """

    def __init__(self, endpoint: str, count: int) -> None:
        self.times: list[list[float]] = [[] for _ in range(count)]
        self.messages = 0
        self.tokens = 0
        self._endpoint = endpoint
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._read(index)) for index in range(len(self.times))]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def all_started(self) -> None:
        """Wait until every stream has had a token. Raises EndpointUnavailable if one ends or gets none in time."""
        deadline = time.perf_counter() + FIRST_TOKENS_SECONDS
        while not all(self.times):
            self.check()
            if time.perf_counter() > deadline:
                silent = sum(not times for times in self.times)
                raise EndpointUnavailable(
                    f"{silent} streams of {self._endpoint} have no token after {FIRST_TOKENS_SECONDS:g} s"
                )
            await asyncio.sleep(POLL_SECONDS)

    def check(self) -> None:
        """Raises the error of a stream that has ended: none should end."""
        for task in self._tasks:
            if task.done():
                task.result()
                raise EndpointUnavailable(f"{self._endpoint} finished a stream before the measurement was over")

    def _note(self, index: int, tokens: int) -> None:
        """Note one message with this many tokens."""
        self.times[index].extend([time.perf_counter()] * tokens)
        self.messages += 1
        self.tokens += tokens

    @abstractmethod
    async def _read(self, index: int) -> None:
        """Read one stream to its end. Raises MeshError."""


class GrpcStreams(TokenStreams):
    """`Generate` streams over several connections, each served by one of the processes that share the endpoint."""

    def __init__(self, endpoint: str, count: int, connections: int = 1) -> None:
        super().__init__(endpoint, count)
        self._channels = [grpc.aio.insecure_channel(endpoint, options=OPTIONS) for _ in range(connections)]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, traceback)
        for channel in self._channels:
            await channel.close()

    async def _read(self, index: int) -> None:
        stub = gateway_pb2_grpc.GatewayServiceStub(self._channels[index % len(self._channels)])
        try:
            call = stub.Generate(endless_request(index))
            while (response := await call.read()) is not grpc.aio.EOF:
                if response.delta.token_count:
                    self._note(index, response.delta.token_count)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
