"""A load client for OpenAI endpoints: streamed chat and text completions over HTTP."""

import asyncio
from contextlib import aclosing
from typing import Any

from loadgen.client import Clock, Target
from loadgen.options import LoadOptions
from loadgen.records import RequestRecord
from loadgen.workload import Answer, Job, Message, as_messages
from mesh.errors import AnswerBroken, ConfigError, EndpointRefused, EndpointUnavailable
from mesh.openai_client import Chunk, OpenAIClient


class OpenAILoadClient:
    """Speaks to the OpenAI API at `options.url`. A message with text counts as one token until usage says otherwise."""

    def __init__(self, options: LoadOptions) -> None:
        assert options.url is not None
        self._options = options
        self._client = OpenAIClient(options.url, options.api_key, options.timeout_s)
        self._model = options.model

    async def discover(self) -> Target:
        found = await self._client.find_model(self._model)
        self._model = found.id
        return Target(found.id, found.vocabulary_size)

    async def send(self, job: Job, record: RequestRecord, clock: Clock) -> Answer:
        path, body = self._request(job)
        said: list[str] = []
        thought: list[str] = []
        try:
            async with asyncio.timeout(self._options.timeout_s), aclosing(self._client.stream(path, body)) as chunks:
                async for chunk in chunks:
                    _note(chunk, record, clock())
                    if job.following is not None and chunk.choices:
                        said.append(chunk.choices[0].content)
                        thought.append(chunk.choices[0].reasoning)
            record.finished_s = clock()
        except TimeoutError:
            record.fail("timeout", f"no end of the answer within {self._options.timeout_s:g} s")
        except EndpointRefused as error:
            record.fail(f"http_{error.status}", error.message)
        except AnswerBroken as error:
            record.fail(error.reason.lower(), error.message)
        except EndpointUnavailable as error:
            record.fail("connection", error.message)
        # An answer that max_tokens ends while the model reasons has nothing else that the history could grow by.
        return Answer("".join(said) or "".join(thought))

    async def close(self) -> None:
        await self._client.close()

    def _request(self, job: Job) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": job.max_tokens,
            "temperature": self._options.temperature,
        }
        if job.exact if self._options.ignore_eos is None else self._options.ignore_eos:
            body["ignore_eos"] = True
        has_messages = isinstance(job.prompt[0], Message)
        if self._options.api == "chat" or (has_messages and self._options.api == "auto"):
            return "chat/completions", body | {"messages": as_messages(job).prompt}
        if has_messages:
            raise ConfigError('the dataset has "messages", which api "completions" cannot send')
        return "completions", body | {"prompt": job.prompt}


def _note(chunk: Chunk, record: RequestRecord, now_s: float) -> None:
    if chunk.choices and (chunk.choices[0].content or chunk.choices[0].reasoning):
        record.tokens(now_s, 1)
    if chunk.usage is not None:
        record.prompt_tokens = chunk.usage.prompt_tokens
        record.output_tokens = chunk.usage.completion_tokens
        record.cached_tokens = chunk.usage.cached_tokens
