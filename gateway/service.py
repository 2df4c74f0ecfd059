"""GatewayService: messages in, generations, messages out."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeAlias

import grpc
from deepmesh.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from msgspec import structs

from gateway import tool_wire
from gateway.asks import Ask, ChatPrompt, Prompt, TextPrompt, TokenPrompt, settled
from gateway.forms import form_wire
from gateway.gateway import Gateway
from gateway.generation import Generation
from gateway.live import LiveGeneration
from gateway.prompts.chat import TemplateOptions
from gateway.prompts.tokenizer import Tokenizer
from gateway.tenants import Tenant
from gateway.text.delta import Delta, Finish, ScoredPrompt, write_report
from mesh.domain import wire
from mesh.domain.outputs import Logprobs
from mesh.domain.sampling import check_logit_bias_count
from mesh.errors import InvalidRequest
from mesh.observe.spans import new_request_id, request_id

# Kept with a stream whose answer has token ids, so that the gateway that resumes it sends them too.
WITH_TOKEN_IDS = b"ids"
# Most log probabilities in one message, alternatives included: clients take 4 MB by default, and the text of a token
# may have 256 bytes.
SCORES_IN_A_MESSAGE = 8192

Context: TypeAlias = "grpc.aio.ServicerContext[gateway_pb2.GenerateRequest, gateway_pb2.GenerateResponse]"

Write: TypeAlias = Callable[[gateway_pb2.GenerateResponse], Awaitable[None]]

ResumeContext: TypeAlias = "grpc.aio.ServicerContext[gateway_pb2.ResumeRequest, gateway_pb2.ResumeResponse]"


class GatewayService(gateway_pb2_grpc.GatewayServiceServicer):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: Context) -> None:
        self._gateway.sampler.begin()
        tenant = self._tenant(context)
        ask, with_ids = self._ask(request), request.return_token_ids
        # The answer takes long, and the message's memory is needed no longer.
        del request
        async with self._gateway.generate(ask, tenant, "grpc", context.time_remaining()) as live:
            await context.write(_started(live.generation))
            await _answer(live, with_ids, self._tokenizer(live), context.write)

    async def Resume(self, request: gateway_pb2.ResumeRequest, context: ResumeContext) -> None:
        self._gateway.sampler.begin()
        tenant = self._tenant(context)
        ask = self._ask(request.request) if request.HasField("request") else None
        resumed = self._gateway.resume(
            request.stream_token, request.position, tenant, "grpc", ask, context.time_remaining()
        )

        async def write(response: gateway_pb2.GenerateResponse) -> None:
            await context.write(gateway_pb2.ResumeResponse(response=response))

        async with resumed as (live, written):
            await write(_started(live.generation))
            await _answer(live, written == WITH_TOKEN_IDS, self._tokenizer(live), write)

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsResponse:
        self._tenant(context)
        models = [
            gateway_pb2.Model(
                name=model.name,
                context_tokens=model.limits.context_tokens,
                vocabulary_size=model.limits.vocabulary_size,
                workers=model.workers,
            )
            for model in self._gateway.catalog.listed()
        ]
        return gateway_pb2.ListModelsResponse(models=models)

    async def CountTokens(
        self, request: gateway_pb2.CountTokensRequest, context: Context
    ) -> gateway_pb2.CountTokensResponse:
        self._tenant(context)
        token_ids = await self._gateway.intake.count(request.model, _prompt(request.prompt))
        return gateway_pb2.CountTokensResponse(tokens=len(token_ids), token_ids=token_ids)

    def _ask(self, request: gateway_pb2.GenerateRequest) -> Ask:
        ask = _ask(request)
        if request.HasField("sampling"):
            return ask
        defaults = self._gateway.catalog.sampling_defaults(request.model)
        return replace(ask, sampling=structs.replace(ask.sampling, **defaults.said))

    def _tokenizer(self, live: LiveGeneration) -> Tokenizer | None:
        return self._gateway.catalog.text(live.generation.model).tokenizer

    def _tenant(self, context: "Context | ResumeContext") -> Tenant:
        metadata = dict(context.invocation_metadata() or ())
        authorization = metadata.get("authorization")
        return self._gateway.tenants.authenticate(authorization if isinstance(authorization, str) else None)


async def _answer(live: LiveGeneration, with_ids: bool, tokenizer: Tokenizer | None, write: Write) -> None:
    """Write everything that follows the message `started`."""
    finish = None
    while finish is None:
        delta = await live.next()
        finish = delta.finish
        if delta.prompt is not None:
            await _write_scores(delta.prompt, tokenizer, write)
        if delta.token_ids or delta.content or delta.reasoning or delta.calls:
            await write(await write_report(delta.logprob_values, _delta, delta, with_ids, tokenizer))
    await write(_finished(finish))


async def _write_scores(prompt: ScoredPrompt, tokenizer: Tokenizer | None, write: Write) -> None:
    messages = _scores(prompt, tokenizer)
    while True:
        message = await write_report(prompt.logprobs.values, next, messages, None)
        if message is None:
            return
        await write(message)


def _scores(prompt: ScoredPrompt, tokenizer: Tokenizer | None) -> Iterator[gateway_pb2.GenerateResponse]:
    """Messages whose deltas have log probabilities of the prompt and no tokens of the answer."""
    token_ids, entries = prompt.token_ids[1:], (each for _, each in prompt.logprobs.positions())
    size = SCORES_IN_A_MESSAGE // (1 + prompt.logprobs.alternatives)
    for begin in range(0, len(token_ids), size):
        response = gateway_pb2.GenerateResponse()
        part = token_ids[begin : begin + size]
        response.delta.prompt_logprobs.extend(_logprobs(part, islice(entries, len(part)), tokenizer))
        yield response


def _ask(request: gateway_pb2.GenerateRequest) -> Ask:
    given = request.sampling
    check_logit_bias_count(len(given.logit_bias))
    return Ask(
        request_id=request_id.get() or new_request_id(),
        model=request.model,
        prompt=_prompt(request.prompt),
        sampling=settled(wire.sampling(given), given.seed if given.HasField("seed") else None),
        max_tokens=request.max_tokens or None,
        stop_strings=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        priority=request.priority,
        sparse_prefill=request.sparse_prefill if request.HasField("sparse_prefill") else None,
        min_tokens=request.min_tokens,
        bad_words=tuple(request.bad_words),
        form=form_wire.answer_form(request.form) if request.HasField("form") else None,
        written=WITH_TOKEN_IDS if request.return_token_ids else b"",
    )


def _prompt(prompt: gateway_pb2.Prompt) -> Prompt:
    match prompt.WhichOneof("form"):
        case "text":
            return TextPrompt(prompt.text)
        case "chat":
            chat = prompt.chat
            options = TemplateOptions(chat.thinking if chat.HasField("thinking") else None)
            return ChatPrompt(tool_wire.chat_messages(chat.messages), options, tool_wire.toolbox(chat))
        case "token_ids":
            return TokenPrompt(prompt.token_ids.ids)
    raise InvalidRequest("the prompt is empty: set text, chat or token_ids", field="prompt")


def _started(generation: Generation) -> gateway_pb2.GenerateResponse:
    request = generation.request
    started = gateway_pb2.GenerateStarted(
        request_id=request.request_id,
        model=generation.model,
        prompt_tokens=len(request.token_ids),
        stream_token=generation.prepared.stream_token,
    )
    return gateway_pb2.GenerateResponse(started=started)


def _delta(delta: Delta, with_ids: bool, tokenizer: Tokenizer | None) -> gateway_pb2.GenerateResponse:
    # The message is filled in place, and only where there is content: building it from submessages takes twice as long.
    response = gateway_pb2.GenerateResponse()
    message = response.delta
    message.token_count = len(delta.token_ids)
    message.position = delta.position
    if delta.content:
        message.text = delta.content
    if delta.reasoning:
        message.reasoning_text = delta.reasoning
    if with_ids:
        message.token_ids.extend(delta.token_ids)
    if delta.logprobs:
        message.logprobs.extend(_logprobs(delta.token_ids, delta.logprobs, tokenizer))
    if delta.calls:
        message.tool_calls.extend(tool_wire.call_deltas(delta.calls))
    return response


def _logprobs(
    token_ids: Sequence[int], entries: Iterable[Logprobs], tokenizer: Tokenizer | None
) -> list[common_pb2.PositionLogprobs]:
    positions = [wire.logprobs_message(each) for each in entries]
    for token_id, position in zip(token_ids, positions, strict=True):
        position.token_id = token_id
        if tokenizer is not None:
            position.text = tokenizer.token_text(token_id)
            for top in position.top:
                top.text = tokenizer.token_text(top.token_id)
    return positions


def _finished(finish: Finish) -> gateway_pb2.GenerateResponse:
    usage = finish.usage
    return gateway_pb2.GenerateResponse(
        finished=gateway_pb2.GenerateFinished(
            finish_reason=wire.finish_reason_number(finish.reason),
            stop_string=finish.stop_string,
            stop_token_id=finish.stop_token_id,
            called_tools=finish.called_tools,
            relaxed=finish.relaxed,
            usage=common_pb2.Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                reasoning_tokens=usage.reasoning_tokens,
                host_cached_tokens=usage.cached.from_host,
                store_cached_tokens=usage.cached.from_stores,
            ),
        )
    )
