"""A client of OpenAI's API: models, whole answers, streamed answers."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgspec

from mesh.errors import AnswerBroken, AnswerIncomplete, EndpointRefused, EndpointUnavailable, UnknownModel

SHOWN_CHARACTERS = 300
END_OF_STREAM = b"[DONE]"
# First part of the paths of OpenAI's API.
VERSION = "v1"
# Listing models is quick, so a server that takes longer counts as unavailable.
DISCOVERY_SECONDS = 10.0
_JSON = {"Content-Type": "application/json"}


class Model(msgspec.Struct):
    id: str
    # Not part of OpenAI's API; deepmesh adds it.
    vocabulary_size: int | None = None


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class StreamedChoice(msgspec.Struct):
    # Set in a chat's chunks; a completion's have `text`.
    delta: Delta | None = None
    text: str | None = None

    @property
    def content(self) -> str:
        return (self.delta.content if self.delta else self.text) or ""

    @property
    def reasoning(self) -> str:
        return (self.delta.reasoning_content if self.delta else None) or ""


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """None if the endpoint does not say."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class ErrorDetail(msgspec.Struct):
    message: str = "no message"


class Chunk(msgspec.Struct):
    """One event of a streamed answer."""

    choices: list[StreamedChoice] = []
    usage: Usage | None = None
    error: ErrorDetail | None = None


class _Error(msgspec.Struct):
    error: ErrorDetail


class _Models(msgspec.Struct):
    data: list[Model]


AnswerT = TypeVar("AnswerT")


class OpenAIClient:
    """A connection to the API at `url` (which ends in /v1); any number of requests may use it at once.

    `timeout_s` bounds each read and write of a request; None waits for ever.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        timeout_s: float | None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            headers=headers,
            limits=limits,
            timeout=timeout_s,
            # A proxy from the environment must not become part of what is measured.
            trust_env=False,
            transport=transport,
            # The system's certificates take some hundredths of a second to read.
            verify=self.url.startswith("https:"),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def find_model(self, name: str | None) -> Model:
        """The model with this name; the first one listed if `name` is None.

        Raises EndpointUnavailable, or UnknownModel if the endpoint does not serve it.
        """
        models = (await self.request("GET", "models", _Models, timeout_s=DISCOVERY_SECONDS)).data
        found = next((model for model in models if name in (None, model.id)), None)
        if found is None:
            names = ", ".join(model.id for model in models) or "none"
            raise UnknownModel(f"{self.url} does not serve model {name!r}; it serves: {names}")
        return found

    async def request(
        self,
        method: str,
        path: str,
        kind: type[AnswerT],
        body: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> AnswerT:
        """A whole answer, decoded as `kind`. `timeout_s` replaces the client's own.

        Raises EndpointRefused for an error status, AnswerBroken if the answer is not a `kind`, and EndpointUnavailable
        if nothing answers.
        """
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else httpx.Timeout(timeout_s)
        try:
            response = await self._http.request(method, f"{self.url}/{path}", json=body, timeout=timeout)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(path, error) from error
        if not response.is_success:
            raise _refusal(response)
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.DecodeError as error:
            raise AnswerBroken(f"{response.url} does not answer as an OpenAI API does: {error}") from error

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        """The events of a streamed answer with its usage, up to [DONE].

        Raises EndpointRefused, EndpointUnavailable, AnswerBroken for an error event or a malformed one, and
        AnswerIncomplete if the stream ends before [DONE]. Close the iterator (`aclosing`) to end the request early.
        """
        content = msgspec.json.encode({**body, "stream": True, "stream_options": {"include_usage": True}})
        try:
            async with self._http.stream("POST", f"{self.url}/{path}", content=content, headers=_JSON) as response:
                if not response.is_success:
                    await response.aread()
                    raise _refusal(response)
                async with aclosing(_events(response)) as events:
                    async for event in events:
                        yield _chunk(event)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(path, error) from error

    def _unreachable(self, path: str, error: Exception) -> EndpointUnavailable:
        return EndpointUnavailable(f"{self.url}/{path} does not answer: {type(error).__name__}: {error}")


async def _events(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Payloads of single-line `data:` fields; OpenAI's streams use no others."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload == END_OF_STREAM:
                    return
                yield payload
    raise AnswerIncomplete("the stream ended before [DONE]")


def _chunk(event: bytes) -> Chunk:
    try:
        chunk = msgspec.json.decode(event, type=Chunk)
    except msgspec.DecodeError as error:
        raise AnswerBroken(f"the stream has a malformed event: {error}") from error
    if chunk.error is not None:
        raise AnswerBroken(f"the answer broke off: {chunk.error.message}")
    return chunk


def _refusal(response: httpx.Response) -> EndpointRefused:
    try:
        complaint = msgspec.json.decode(response.content, type=_Error).error.message
    except msgspec.DecodeError:
        complaint = response.text[:SHOWN_CHARACTERS]
    if response.status_code == HTTPStatus.NOT_FOUND and VERSION not in response.url.path.split("/"):
        complaint += f" (an OpenAI API's URL ends in /{VERSION})"
    # A date instead of seconds is not parsed: the caller then uses its own delay.
    seconds = response.headers.get("retry-after", "")
    return EndpointRefused(
        f"{response.url} answered {response.status_code}: {complaint}",
        status=response.status_code,
        retry_after_ms=int(seconds) * 1000 if seconds.isdigit() else None,
    )
