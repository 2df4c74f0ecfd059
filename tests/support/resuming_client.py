"""A client that resumes at another gateway if its own is lost, as clients of a mesh with several gateways should."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from deepmesh.v1 import gateway_pb2, gateway_pb2_grpc

from mesh.errors import MeshError, Retry
from mesh.rpc.failures import from_rpc_error
from tests.support.mesh_requests import request_of

# A gateway that sends nothing for so long is given up. This is longer than a worker's freeze may last.
SILENCE_SECONDS = 12.0
PAUSE_SECONDS = 0.05
ATTEMPTS = 200


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    # The longest time without a token, including the wait for the first.
    longest_pause: float = 0.0
    # How often the client had to resume at another gateway.
    resumed: int = 0


class ResumingClient:
    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        self._stubs = [gateway_pb2_grpc.GatewayServiceStub(channel) for channel in channels]

    async def ask(self, prompt: Sequence[int], tokens: int, first_gateway: int = 0) -> Answer:
        """Get every token exactly once, even if gateways are lost. Raises MeshErrors that another gateway cannot
        avoid.
        """
        request, answer, stream = request_of(prompt, tokens), Answer(), ""
        last = time.monotonic()
        for attempt in range(ATTEMPTS):
            stub = self._stubs[(first_gateway + attempt) % len(self._stubs)]
            try:
                async for response in _responses(stub, request, stream, len(answer.tokens)):
                    stream = response.started.stream_token or stream
                    if response.delta.token_ids:
                        answer.longest_pause = max(answer.longest_pause, time.monotonic() - last)
                        last = time.monotonic()
                        answer.tokens.extend(response.delta.token_ids)
                return answer
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                _check_passes(error)
            answer.resumed += 1
            await asyncio.sleep(PAUSE_SECONDS)
        raise AssertionError(f"no answer in {ATTEMPTS} attempts")


async def _responses(
    stub: gateway_pb2_grpc.GatewayServiceStub, request: gateway_pb2.GenerateRequest, stream: str, position: int
) -> AsyncIterator[gateway_pb2.GenerateResponse]:
    resume = gateway_pb2.ResumeRequest(stream_token=stream, position=position, request=request)
    call = stub.Resume(resume) if stream else stub.Generate(request)
    try:
        while (message := await _read(call)) is not grpc.aio.EOF:
            yield message.response if stream else message
    finally:
        call.cancel()


async def _read(call: Any) -> Any:
    # Python 3.11's `wait_for` forgets that its task was cancelled if the answer comes at that moment.
    async with asyncio.timeout(SILENCE_SECONDS):
        return await call.read()


def _check_passes(error: Exception) -> None:
    """Raises the error if another attempt cannot help."""
    if isinstance(error, grpc.aio.AioRpcError):
        refusal: MeshError = from_rpc_error(error)
        if refusal.retry is Retry.NEVER:
            raise refusal
