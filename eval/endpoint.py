"""An OpenAI-compatible endpoint: whole chat answers, and the likelihood of a text where it can say so."""

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgspec

from mesh.errors import EndpointUnavailable, InvalidRequest, MeshError, UnknownModel

# The endpoint is full or restarts: worth waiting for.
BUSY = (429, 502, 503, 504)
FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 30.0
SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; temperature 0 is greedy."""

    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True)
class Completion:
    """An answer: what the user sees, and the reasoning where the endpoint tells it apart."""

    content: str
    reasoning: str
    cut_off: bool
    prompt_tokens: int
    answer_tokens: int


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    # The same under its newer name.
    reasoning: str | None = None


class _ChatChoice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chat(msgspec.Struct):
    choices: list[_ChatChoice]
    usage: _Usage = msgspec.field(default_factory=_Usage)


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]


class _TextChoice(msgspec.Struct):
    text: str
    logprobs: _Logprobs | None = None


class _Text(msgspec.Struct):
    choices: list[_TextChoice]
    usage: _Usage = msgspec.field(default_factory=_Usage)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _ErrorDetail(msgspec.Struct):
    message: str


class _Error(msgspec.Struct):
    error: _ErrorDetail


AnswerT = TypeVar("AnswerT")


class Endpoint:
    """One model at the OpenAI API at `url`; any number of requests may run at once.

    `timeout_s` bounds each attempt at a request, and how long an overloaded endpoint is waited for.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None, timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._model = model
        self._timeout_s = timeout_s
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        # A proxy of the environment is not part of what is judged.
        self._http = httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout_s, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def choose_model(self) -> str:
        """The model to ask. Raises EndpointUnavailable, or UnknownModel where it is not served."""
        models = self._decode(await self._call("GET", "models", None, patience_s=0.0), _Models).data
        found = next((model.id for model in models if self._model in (None, model.id)), None)
        if found is None:
            names = ", ".join(model.id for model in models) or "none"
            raise UnknownModel(f"{self._url} does not serve model {self._model!r}; it serves: {names}")
        self._model = found
        return found

    async def chat(self, prompt: str, max_tokens: int, sampling: Sampling) -> Completion:
        """The whole answer to one user message. Raises InvalidRequest where the endpoint refuses this request,
        EndpointUnavailable where it answers none."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        }
        answer = self._decode(await self._call("POST", "chat/completions", body, self._timeout_s), _Chat)
        if not answer.choices:
            raise EndpointUnavailable(f"{self._url} answered without a choice")
        choice = answer.choices[0]
        return Completion(
            content=choice.message.content or "",
            reasoning=choice.message.reasoning_content or choice.message.reasoning or "",
            cut_off=choice.finish_reason == "length",
            prompt_tokens=answer.usage.prompt_tokens,
            answer_tokens=answer.usage.completion_tokens,
        )

    async def text_logprobs(self, text: str) -> list[float] | None:
        """The natural log of each token's probability after those before it, where the endpoint echoes prompts with
        them; None where it does not."""
        body = {"model": self._model, "prompt": text, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
        try:
            answer = self._decode(await self._call("POST", "completions", body, self._timeout_s), _Text)
        except InvalidRequest:
            return None
        choice = answer.choices[0] if answer.choices else None
        # Servers that know no `echo` ignore it, and answer with the generated token alone.
        if choice is None or choice.logprobs is None or text not in choice.text:
            return None
        generated = answer.usage.completion_tokens
        prompt_logprobs = choice.logprobs.token_logprobs[: -generated or None]
        # The first token has nothing before it.
        return [logprob for logprob in prompt_logprobs if logprob is not None]

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, patience_s: float) -> httpx.Response:
        """Try again while the endpoint is busy, ever later, for `patience_s` in all."""
        began, delay = time.monotonic(), FIRST_DELAY_SECONDS
        while True:
            try:
                response = await self._http.request(method, f"{self._url}/{path}", json=body)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                failure, asked = f"{type(error).__name__}: {error}", 0.0
            else:
                if response.status_code not in BUSY:
                    return self._checked(response)
                failure, asked = _complaint(response), _retry_after(response)
            wait = min(max(asked, delay), LONGEST_DELAY_SECONDS)
            if time.monotonic() + wait - began > patience_s:
                raise EndpointUnavailable(f"{self._url}/{path} does not answer: {failure}")
            await asyncio.sleep(wait)
            delay *= 2

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if response.is_success:
            return response
        error: type[MeshError] = InvalidRequest if response.status_code in (400, 413, 422) else EndpointUnavailable
        raise error(f"{response.url} answered {response.status_code}: {_complaint(response)}")

    def _decode(self, response: httpx.Response, kind: type[AnswerT]) -> AnswerT:
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.DecodeError as error:
            raise EndpointUnavailable(f"{response.url} does not answer as an OpenAI API does: {error}") from error


def _complaint(response: httpx.Response) -> str:
    """What the endpoint says is wrong."""
    try:
        return msgspec.json.decode(response.content, type=_Error).error.message
    except msgspec.DecodeError:
        return response.text[:SHOWN_CHARACTERS]


def _retry_after(response: httpx.Response) -> float:
    """Seconds; 0 where the endpoint does not say, or names a date."""
    value = response.headers.get("retry-after", "")
    return float(value) if value.isdigit() else 0.0
