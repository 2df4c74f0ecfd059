"""One streamed chat, over gRPC or over OpenAI HTTP, with its timings."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from deepmesh.v1 import gateway_pb2, gateway_pb2_grpc

from mesh.failures import from_rpc_error
from mesh.openai_client import OpenAIClient

# Text of the answer, or of the reasoning before it (True), as it arrives.
Show = Callable[[str, bool], None]


@dataclass
class Answer:
    """Filled in as the answer streams; a stopped answer keeps what had come."""

    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    _started: float = 0.0
    _first: float | None = None
    _last: float | None = None

    @property
    def ttft_ms(self) -> float | None:
        """Milliseconds from the request to its first text."""
        return None if self._first is None else (self._first - self._started) * 1000

    @property
    def tpot_ms(self) -> float | None:
        """Mean milliseconds per token after the first."""
        if self._first is None or self._last is None or self.completion_tokens < 2:
            return None
        return (self._last - self._first) * 1000 / (self.completion_tokens - 1)

    def asked(self) -> None:
        """The request leaves now."""
        self._started = time.perf_counter()

    def arrived(self) -> None:
        """Text came just now."""
        self._last = time.perf_counter()
        self._first = self._first or self._last


async def stream_grpc(
    stub: gateway_pb2_grpc.GatewayServiceStub,
    request: gateway_pb2.GenerateRequest,
    answer: Answer,
    show: Show,
    metadata: Sequence[tuple[str, str]] = (),
) -> None:
    """Run `request` to its end, into `answer`. Raises MeshError; cancelling it cancels the call."""
    answer.asked()
    call = stub.Generate(request, metadata=metadata)
    try:
        while (response := await call.read()) is not grpc.aio.EOF:
            event = response.WhichOneof("event")
            if event == "delta":
                answer.arrived()
                answer.text += response.delta.text
                show(response.delta.reasoning_text, True)
                show(response.delta.text, False)
            elif event == "finished":
                _take_usage(answer, response.finished.usage)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()


async def stream_http(client: OpenAIClient, body: Mapping[str, Any], answer: Answer, show: Show) -> None:
    """The same over OpenAI's HTTP API: `body` is a chat completion's. Raises EndpointUnavailable."""
    answer.asked()
    async with aclosing(client.stream("chat/completions", body)) as chunks:
        async for chunk in chunks:
            for choice in chunk.choices:
                if choice.content or choice.reasoning:
                    answer.arrived()
                answer.text += choice.content
                show(choice.reasoning, True)
                show(choice.content, False)
            if chunk.usage is not None:
                answer.prompt_tokens = chunk.usage.prompt_tokens
                answer.completion_tokens = chunk.usage.completion_tokens
                answer.cached_tokens = chunk.usage.cached_tokens or 0


def chat_prompt(messages: Sequence[Mapping[str, str]]) -> gateway_pb2.Prompt:
    """OpenAI's messages as a gRPC prompt."""
    return gateway_pb2.Prompt(chat=gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(**each) for each in messages]))


def _take_usage(answer: Answer, usage: Any) -> None:
    answer.prompt_tokens = usage.prompt_tokens
    answer.cached_tokens = usage.cached_tokens
    answer.completion_tokens = usage.completion_tokens
