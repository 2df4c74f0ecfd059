"""Turns an ask into a validated request in token ids."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from msgspec import structs

from gateway.asks import Ask, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from gateway.catalog import Catalog, ModelText
from gateway.config import LimitsConfig
from gateway.forms.answer_forms import AnswerForm, GrammarForm, JsonForm, schema_of
from gateway.forms.constraints import (
    TOOLS_FIELD,
    UNSHAPED,
    AnswerShape,
    check_room,
    constraint_for,
    judged,
    with_bans,
)
from gateway.forms.grammar_checks import GrammarChecks
from gateway.prepared import Prepared, TextReading
from gateway.prompts.tokenizer import Tokenizer
from gateway.requests import (
    ModelLimits,
    completion_room,
    settled_sparse_prefill,
    truncated,
    validate_cache_salt,
    validate_priority,
    validate_stop_strings,
    validate_text,
)
from gateway.shortest_first import ShortestFirst
from gateway.text.reasoning import THINK_CLOSE
from gateway.text.signs import NO_SIGNS
from gateway.text.transcript import Transcript, no_text
from gateway.tools import check_nesting, check_toolbox
from mesh.blocks import chain_hashes
from mesh.domain.constraints import Constraint
from mesh.domain.requests import TokenRequest
from mesh.domain.sampling import (
    StopConditions,
    check_prompt_logprobs,
    check_sampling,
    check_stop_token_ids,
    check_token_ids,
    settled_draft_use,
)
from mesh.domain.shares import Share
from mesh.errors import InvalidRequest
from mesh.memory.freed_memory import release_freed_memory
from mesh.observe.spans import span

# A longer prompt is prepared on a thread, so that the event loop can serve the other streams meanwhile.
LONG_PROMPT = 4096
# A message takes as long as so much text, however short it is.
MESSAGE_CHARACTERS = 32
# After a longer prompt the freed memory is given back to the system: encoding takes about 100 bytes a character.
HUGE_PROMPT = 100_000
# As many prompts of the largest size may wait to be encoded.
MOST_WAITING = 64

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class _Encoded:
    token_ids: Sequence[int]
    shape: AnswerShape = UNSHAPED


class Intake:
    """Turns asks into validated requests. It encodes one long prompt at a time, so that memory stays bounded,
    and of those that wait the shortest first.
    """

    def __init__(self, catalog: Catalog, limits: LimitsConfig) -> None:
        self._catalog = catalog
        self._limits = limits
        self._thread = ShortestFirst("intake", MOST_WAITING * limits.prompt_characters)
        self._grammars = GrammarChecks()

    def close(self) -> None:
        self._thread.close()
        self._grammars.close()

    async def prepare(self, ask: Ask, cache_salt: bytes, share: Share) -> Prepared:
        """Raises InvalidRequest (naming the field), ContextExceeded, UnknownModel or NoWorker."""
        model = self._catalog.resolve(ask.model)
        limits, text = self._catalog.limits(model), self._catalog.text(model)
        _check(ask, model, limits, text.tokenizer)
        with span("gateway.encode"):
            with ask.names.given():
                encoded = await self._encode(ask.prompt, model, ask.form)
            token_ids = truncated(encoded.token_ids, ask.truncate_prompt_tokens, ask.max_tokens, limits)
            max_tokens = completion_room(len(token_ids), ask.max_tokens, limits, ask.names)
            check_prompt_logprobs(ask.sampling, len(token_ids))
            sparse = settled_sparse_prefill(ask.sparse_prefill, self._catalog.sparse_prefill(model), len(token_ids))
            block_hashes = await self._run(len(token_ids), lambda: chain_hashes(token_ids, cache_salt, sparse))
        constraint = await self._constraint(ask, model, share.tenant, encoded.shape, max_tokens, text.tokenizer)
        drafts = settled_draft_use(ask.sampling, constrained=constraint is not None)
        request = TokenRequest(
            request_id=ask.request_id,
            token_ids=token_ids,
            sampling=structs.replace(ask.sampling, drafts=drafts),
            stop=StopConditions(max_tokens, ask.stop_token_ids, ask.ignore_eos),
            cache_salt=cache_salt,
            share=share,
            constraint=constraint,
            sparse=sparse,
        )
        shape = encoded.shape.under(constraint)
        return Prepared(
            model,
            request,
            _transcripts(ask, shape, text.tokenizer),
            block_hashes,
            _echo(ask.prompt, encoded.token_ids, token_ids, text.tokenizer) if ask.echo else "",
            _plain_reading(ask, shape),
            form_field=None if constraint is None or constraint.grammar is None else _form_field(ask.form),
        )

    async def count(self, model: str, prompt: Prompt, form: AnswerForm | None = None) -> Sequence[int]:
        """The prompt's token ids, as `prepare` would encode them. Raises as `prepare` does.

        form: that the answer is to have.
        """
        encoded = await self._encode(prompt, self._catalog.resolve(model), form)
        return encoded.token_ids

    async def _constraint(
        self, ask: Ask, model: str, tenant: str, shape: AnswerShape, max_tokens: int, tokenizer: Tokenizer | None
    ) -> Constraint | None:
        """Raises InvalidRequest naming the field, and Overloaded."""
        form = ask.form
        if isinstance(form, GrammarForm):
            form = await self._grammars.in_lark(form, tenant)
        form, shape = await self._enforceable(form, shape, tenant)
        constraint = constraint_for(form, shape, tokenizer)
        if constraint is not None:
            grammar, field = constraint.grammar or "", _form_field(form)
            judge = partial(judged, grammar, form, shape, tokenizer)
            least_tokens = await self._grammars.check(grammar, model, field, tenant, judge)
            check_room(least_tokens, max_tokens, ask.names)
        return with_bans(constraint, ask.bad_words, ask.min_tokens, max_tokens, tokenizer)

    async def _enforceable(
        self, form: AnswerForm | None, shape: AnswerShape, tenant: str
    ) -> tuple[AnswerForm | None, AnswerShape]:
        """The same without the parts of schemas that cannot be enforced, where the client is not strict."""
        if isinstance(form, JsonForm) and form.lenient:
            check_nesting(form.schema, form.field)
            (schema,) = await self._grammars.enforceable([form.schema], form.field, tenant)
            form = replace(form, schema=schema)
        lenient = shape.lenient_tools(form)
        if shape.toolbox is not None and lenient:
            schemas = await self._grammars.enforceable([tool.parameters for tool in lenient], TOOLS_FIELD, tenant)
            changed = {
                tool.name: replace(tool, parameters=schema) for tool, schema in zip(lenient, schemas, strict=True)
            }
            tools = [changed.get(tool.name, tool) for tool in shape.toolbox.tools]
            shape = replace(shape, toolbox=replace(shape.toolbox, tools=tools))
        return form, shape

    async def _encode(self, prompt: Prompt, model: str, form: AnswerForm | None) -> _Encoded:
        limits, text = self._catalog.limits(model), self._catalog.text(model)
        schema = schema_of(form)
        size = self._size(prompt)
        if isinstance(prompt, ChatPrompt):
            size += MESSAGE_CHARACTERS * len(prompt.messages)

        def encode() -> _Encoded:
            encoded = _encoded(prompt, schema, model, text, limits)
            if size > HUGE_PROMPT:
                release_freed_memory()
            return encoded

        return await self._run(size, encode)

    async def _run(self, size: int, work: Callable[[], ResultT]) -> ResultT:
        if size <= LONG_PROMPT:
            return work()
        return await self._thread.run(size, work)

    def _size(self, prompt: Prompt) -> int:
        """Characters or token ids of the prompt. Raises InvalidRequest if they are too many to be encoded, or if its
        tools are wrong.
        """
        unit = "characters"
        if isinstance(prompt, TokenPrompt):
            # Token ids count like characters: a text rarely has more tokens than characters.
            size, unit, field = len(prompt.token_ids), "token ids", "prompt"
        elif isinstance(prompt, TextPrompt):
            size, field = len(prompt.text), "prompt"
        else:
            if prompt.toolbox is not None:
                check_toolbox(prompt.toolbox)
            size, field = prompt.characters, "messages"
        if size > self._limits.prompt_characters:
            limit = self._limits.prompt_characters
            raise InvalidRequest(f"the prompt has {size} {unit}, the limit is {limit}", field=field)
        return size


def _check(ask: Ask, model: str, limits: ModelLimits, tokenizer: Tokenizer | None) -> None:
    """Raises InvalidRequest for what is wrong with the request, apart from its prompt and the form of its answer."""
    check_sampling(ask.sampling, limits.vocabulary_size)
    validate_stop_strings(ask.stop_strings)
    check_stop_token_ids(ask.stop_token_ids, limits.vocabulary_size)
    validate_priority(ask.priority)
    if ask.cache_salt is not None:
        validate_cache_salt(ask.cache_salt)
    if ask.stop_strings and tokenizer is None:
        raise no_tokenizer(model, "stop")


def _encoded(
    prompt: Prompt, answer_schema: Mapping[str, Any] | None, model: str, text: ModelText, limits: ModelLimits
) -> _Encoded:
    if isinstance(prompt, TokenPrompt):
        if not prompt.token_ids:
            raise InvalidRequest("the prompt is empty: send at least one token id", field="prompt")
        check_token_ids(prompt.token_ids, limits.vocabulary_size, field="prompt")
        return _Encoded(array("I", prompt.token_ids))
    if text.tokenizer is None:
        raise no_tokenizer(model, "prompt" if isinstance(prompt, TextPrompt) else "messages")
    if isinstance(prompt, TextPrompt):
        if not prompt.text:
            raise InvalidRequest("the prompt is empty: send at least one character", field="prompt")
        validate_text(prompt.text, field="prompt")
        encode = text.tokenizer.encode_prompt if prompt.with_beginning else text.tokenizer.encode
        return _Encoded(array("I", encode(prompt.text)))
    if text.chat is None:
        raise InvalidRequest(f"{model!r} has no chat template: send a raw prompt", field="messages")
    rendered = text.chat.render(prompt.messages, prompt.options, prompt.toolbox, answer_schema)
    closed_by = text.tokenizer.control_id(THINK_CLOSE) if rendered.closed else None
    shape = AnswerShape(rendered.reasoning, rendered.wants_reasoning, prompt.toolbox, rendered.tools, closed_by)
    return _Encoded(array("I", rendered.token_ids), shape)


def _transcripts(ask: Ask, shape: AnswerShape, tokenizer: Tokenizer | None) -> Callable[[], Transcript]:
    """Makes the transcript of each answer to the request."""
    return partial(
        Transcript,
        no_text if tokenizer is None else tokenizer.token_bytes,
        ask.stop_strings,
        shape.reasoning,
        include_stop_string=ask.include_stop_string,
        tools=shape.calls,
        closed_by=shape.closed_by,
        signs=NO_SIGNS if tokenizer is None else tokenizer.signs,
    )


def _plain_reading(ask: Ask, shape: AnswerShape) -> TextReading | None:
    """How a resuming gateway reads the answer; None if it may have calls of tools."""
    if shape.calls is not None:
        return None
    return TextReading(ask.stop_strings, ask.include_stop_string, shape.reasoning.value, shape.closed_by)


def _form_field(form: AnswerForm | None) -> str:
    """The request field that the constraint's grammar comes from."""
    return TOOLS_FIELD if form is None else form.field


def _echo(prompt: Prompt, encoded: Sequence[int], kept: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """The text of the tokens kept of a prompt. If all were kept, it is the text as the client wrote it."""
    if isinstance(prompt, TextPrompt) and len(kept) == len(encoded):
        return prompt.text
    if tokenizer is None:
        raise InvalidRequest("a prompt of token ids has no text without a tokenizer", field="echo")
    return tokenizer.spell(kept)


def no_tokenizer(model: str, field: str) -> InvalidRequest:
    return InvalidRequest(f"{model!r} is served without a tokenizer: send token ids", field=field)
