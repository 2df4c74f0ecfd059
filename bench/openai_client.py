"""A load client for OpenAI endpoints: streamed chat and text completions over HTTP."""

import asyncio
from typing import Any

import httpx
import msgspec

from bench.client import Clock, Target
from bench.options import LoadOptions
from bench.records import RequestRecord
from bench.server_sent_events import EventSplitter
from bench.workload import Job, Message, as_messages
from mesh.errors import ConfigError, EndpointUnavailable, UnknownModel

END_OF_STREAM = b"[DONE]"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text or (self.delta and (self.delta.content or self.delta.reasoning_content)))


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Error(msgspec.Struct):
    message: str = "no message"


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str
    vocabulary_size: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class OpenAIClient:
    """Speaks to the OpenAI API at `options.url`. A message with text counts as one token until usage says otherwise."""

    def __init__(self, options: LoadOptions) -> None:
        assert options.url is not None
        self._options = options
        self._url = options.url.rstrip("/")
        self._model = options.model
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        # A proxy of the environment would be measured with the endpoint.
        self._http = httpx.AsyncClient(headers=headers, limits=limits, timeout=options.timeout_s, trust_env=False)

    async def discover(self) -> Target:
        try:
            response = await self._http.get(f"{self._url}/models", timeout=10.0)
            response.raise_for_status()
            models = msgspec.json.decode(response.content, type=_Models).data
        except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError) as error:
            raise EndpointUnavailable(f"{self._url}/models does not answer as an OpenAI API does: {error}") from error
        found = next((model for model in models if self._model in (None, model.id)), None)
        if found is None:
            names = ", ".join(model.id for model in models) or "none"
            raise UnknownModel(f"{self._url} does not serve model {self._model!r}; it serves: {names}")
        self._model = found.id
        return Target(found.id, found.vocabulary_size)

    async def send(self, job: Job, record: RequestRecord, clock: Clock) -> None:
        path, body = self._request(job)
        try:
            async with asyncio.timeout(self._options.timeout_s):
                await self._stream(f"{self._url}/{path}", body, record, clock)
        except TimeoutError:
            record.fail("timeout", f"no end of the answer within {self._options.timeout_s:g} s")
        except httpx.HTTPError as error:
            record.fail("connection", f"{type(error).__name__}: {error}")
        except msgspec.DecodeError as error:
            record.fail("malformed", str(error))

    async def close(self) -> None:
        await self._http.aclose()

    def _request(self, job: Job) -> tuple[str, dict[str, Any]]:
        body = {
            "model": self._model,
            "max_tokens": job.max_tokens,
            "temperature": self._options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._options.answers_ignore_eos:
            body["ignore_eos"] = True
        has_messages = isinstance(job.prompt[0], Message)
        if self._options.api == "chat" or (has_messages and self._options.api == "auto"):
            return "chat/completions", body | {"messages": as_messages(job).prompt}
        if has_messages:
            raise ConfigError('the dataset has "messages", which api "completions" cannot send')
        return "completions", body | {"prompt": job.prompt}

    async def _stream(self, url: str, body: dict[str, Any], record: RequestRecord, clock: Clock) -> None:
        content = msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        async with self._http.stream("POST", url, content=content, headers=headers) as response:
            if response.status_code != 200:
                await response.aread()
                record.fail(f"http_{response.status_code}", response.text[:500])
                return
            await self._read(response, record, clock)

    async def _read(self, response: httpx.Response, record: RequestRecord, clock: Clock) -> None:
        splitter = EventSplitter()
        async for data in response.aiter_bytes():
            for event in splitter.feed(data):
                if event == END_OF_STREAM:
                    record.finished_s = clock()
                else:
                    self._note(msgspec.json.decode(event, type=_Chunk), record, clock())
        if record.finished_s is None and record.error is None:
            record.fail("incomplete", "the stream ended before [DONE]")

    def _note(self, chunk: _Chunk, record: RequestRecord, now_s: float) -> None:
        if chunk.error is not None:
            record.fail("stream_error", chunk.error.message)
        if chunk.choices and chunk.choices[0].has_text:
            record.tokens(now_s, 1)
        if chunk.usage is not None:
            record.prompt_tokens = chunk.usage.prompt_tokens
            record.output_tokens = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            record.cached_tokens = details.cached_tokens if details else None
