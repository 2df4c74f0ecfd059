"""An OpenAI-compatible endpoint: whole chat answers, and the likelihood of a text if it can give that."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from mesh.errors import AnswerBroken, EndpointRefused, EndpointUnavailable, InvalidRequest
from mesh.openai_client import OpenAIClient, Usage

# Statuses of an endpoint that is full or restarts: ask again later.
BUSY = (429, 502, 503, 504)
# Statuses of an endpoint that understood the request and refuses it.
REFUSED = (400, 413, 422)
FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 30.0


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; temperature 0 is greedy."""

    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True)
class Completion:
    """An answer: what the user sees, and the reasoning if the endpoint separates it."""

    content: str
    reasoning: str
    cut_off: bool
    prompt_tokens: int
    answer_tokens: int


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    # `reasoning_content` under its newer name.
    reasoning: str | None = None


class _ChatChoice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Chat(msgspec.Struct):
    choices: list[_ChatChoice]
    usage: Usage = msgspec.field(default_factory=Usage)


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]


class _TextChoice(msgspec.Struct):
    text: str
    logprobs: _Logprobs | None = None


class _Text(msgspec.Struct):
    choices: list[_TextChoice]
    usage: Usage = msgspec.field(default_factory=Usage)


AnswerT = TypeVar("AnswerT")


class Endpoint:
    """One model at the OpenAI API at `url`; any number of requests may run at once.

    `timeout_s` bounds each attempt at a request, and the wait for an overloaded endpoint.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None, timeout_s: float) -> None:
        self._client = OpenAIClient(url, api_key, timeout_s)
        self._model = model
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def choose_model(self) -> str:
        """The model to ask. Raises EndpointUnavailable, or UnknownModel if it is not served."""
        self._model = (await self._client.find_model(self._model)).id
        return self._model

    async def chat(self, prompt: str, max_tokens: int, sampling: Sampling) -> Completion:
        """The whole answer to one user message. Raises InvalidRequest if the endpoint refuses this request,
        EndpointUnavailable if it answers no request."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        }
        answer = await self._ask("chat/completions", body, _Chat)
        if not answer.choices:
            raise EndpointUnavailable(f"{self._client.url} answered without a choice")
        choice = answer.choices[0]
        return Completion(
            content=choice.message.content or "",
            reasoning=choice.message.reasoning_content or choice.message.reasoning or "",
            cut_off=choice.finish_reason == "length",
            prompt_tokens=answer.usage.prompt_tokens,
            answer_tokens=answer.usage.completion_tokens,
        )

    async def text_logprobs(self, text: str) -> list[float] | None:
        """The natural log of each token's probability given those before it; None if the endpoint does not echo prompts
        with log probabilities."""
        body = {"model": self._model, "prompt": text, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
        try:
            answer = await self._ask("completions", body, _Text)
        except InvalidRequest:
            return None
        choice = answer.choices[0] if answer.choices else None
        # Servers that do not know `echo` ignore it and return the generated token alone.
        if choice is None or choice.logprobs is None or text not in choice.text:
            return None
        generated = answer.usage.completion_tokens
        prompt_logprobs = choice.logprobs.token_logprobs[: -generated or None]
        # The first token has no probability, because nothing precedes it.
        return [logprob for logprob in prompt_logprobs if logprob is not None]

    async def _ask(self, path: str, body: Mapping[str, Any], kind: type[AnswerT]) -> AnswerT:
        """Send a request. While the endpoint is busy or does not answer, ask again after growing delays, for
        `timeout_s` in all."""
        began, delay = time.monotonic(), FIRST_DELAY_SECONDS
        while True:
            try:
                return await self._client.request("POST", path, kind, body)
            except EndpointRefused as error:
                if error.status in REFUSED:
                    raise InvalidRequest(error.message) from error
                if error.status not in BUSY:
                    raise
                failure: EndpointUnavailable = error
                asked = (error.retry_after_ms or 0) / 1000
            except AnswerBroken:
                raise
            except EndpointUnavailable as error:
                failure, asked = error, 0.0
            wait = min(max(asked, delay), LONGEST_DELAY_SECONDS)
            if time.monotonic() + wait - began > self._timeout_s:
                raise EndpointUnavailable(f"given up after {self._timeout_s:g} s: {failure.message}") from failure
            await asyncio.sleep(wait)
            delay *= 2
