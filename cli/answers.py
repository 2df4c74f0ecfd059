"""One streamed chat, over gRPC or over OpenAI HTTP, with its timings."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from deepmesh.v1 import gateway_pb2, gateway_pb2_grpc

from mesh.openai_client import OpenAIClient
from mesh.rpc.failures import from_rpc_error

# Called with each piece of text as it arrives, and whether it is reasoning.
Show = Callable[[str, bool], None]


@dataclass
class Answer:
    """An answer as far as it has streamed, with its timings. A stopped answer keeps the text that has come."""

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

    def start(self) -> None:
        """Note that the request is sent now."""
        self._started = time.perf_counter()

    def note_text(self) -> None:
        """Note that text has just arrived."""
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
    answer.start()
    call = stub.Generate(request, metadata=metadata)
    try:
        while (response := await call.read()) is not grpc.aio.EOF:
            event = response.WhichOneof("event")
            if event == "delta":
                answer.note_text()
                answer.text += response.delta.text
                show(response.delta.reasoning_text, True)
                show(response.delta.text, False)
            elif event == "finished":
                _copy_usage(answer, response.finished.usage)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()


async def stream_http(client: OpenAIClient, body: Mapping[str, Any], answer: Answer, show: Show) -> None:
    """Run a chat completion with this `body` to its end, into `answer`, over OpenAI's HTTP API.

    Raises EndpointUnavailable.
    """
    answer.start()
    async with aclosing(client.stream("chat/completions", body)) as chunks:
        async for chunk in chunks:
            for choice in chunk.choices:
                if choice.content or choice.reasoning:
                    answer.note_text()
                answer.text += choice.content
                show(choice.reasoning, True)
                show(choice.content, False)
            if chunk.usage is not None:
                answer.prompt_tokens = chunk.usage.prompt_tokens
                answer.completion_tokens = chunk.usage.completion_tokens
                answer.cached_tokens = chunk.usage.cached_tokens or 0


def chat_prompt(messages: Sequence[Mapping[str, str]]) -> gateway_pb2.Prompt:
    """A gRPC prompt of messages in OpenAI's form."""
    turns = [gateway_pb2.ChatMessage(role=each["role"], content=each["content"]) for each in messages]
    return gateway_pb2.Prompt(chat=gateway_pb2.Chat(messages=turns))


def _copy_usage(answer: Answer, usage: Any) -> None:
    answer.prompt_tokens = usage.prompt_tokens
    answer.cached_tokens = usage.cached_tokens
    answer.completion_tokens = usage.completion_tokens
