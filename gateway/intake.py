"""From what an API was asked to a validated request in token ids."""

import asyncio
import secrets
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from msgspec import Struct, json, structs

from gateway.answer_forms import AnswerForm, GrammarForm
from gateway.catalog import Catalog, ModelText
from gateway.chat import DEFAULT_OPTIONS, TemplateOptions
from gateway.config import LimitsConfig
from gateway.constraints import UNSHAPED, AnswerShape, check_room, constraint_for, with_bans
from gateway.grammar_checks import GrammarChecks
from gateway.memory import release_freed_memory
from gateway.reasoning import ReasoningStart
from gateway.requests import (
    ModelLimits,
    completion_room,
    truncated,
    validate_cache_salt,
    validate_priority,
    validate_stop_strings,
    validate_text,
)
from gateway.tokenizer import Tokenizer
from gateway.tools import Toolbox
from gateway.transcript import Transcript, no_text
from gateway.turns import ChatMessage
from mesh.blocks import chain_hashes
from mesh.domain.constraints import Constraint
from mesh.domain.outputs import FinishReason
from mesh.domain.requests import StreamTag, TokenRequest
from mesh.domain.sampling import (
    Sampling,
    StopConditions,
    check_sampling,
    check_stop_token_ids,
    check_token_ids,
    settled_draft_use,
)
from mesh.domain.shares import Share
from mesh.errors import InvalidRequest
from mesh.observe import span

# A prompt of more than this is prepared on a thread: the event loop has every other stream to serve.
LONG_PROMPT = 4096
# Encoding needs about 100 bytes a character until it is done.
HUGE_PROMPT = 100_000


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    # Put the model's beginning-of-sequence token before the text, if it wants one.
    with_beginning: bool = True


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Sequence[ChatMessage]
    options: TemplateOptions = DEFAULT_OPTIONS
    # What the model may call.
    toolbox: Toolbox | None = None

    @property
    def characters(self) -> int:
        """How much text there is for the template."""
        tools = self.toolbox.tools if self.toolbox is not None else ()
        size = sum(len(text) for message in self.messages for text in message.texts)
        return size + sum(len(tool.description) + len(json.encode(tool.parameters)) for tool in tools)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: Sequence[int]


Prompt = TextPrompt | ChatPrompt | TokenPrompt
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Ask:
    """A generation in a client's terms; None if the client left the choice to us."""

    request_id: str
    model: str
    prompt: Prompt
    sampling: Sampling
    max_tokens: int | None
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    # The text ends with the stop string that ended it.
    include_stop_string: bool = False
    # Keep this many of the prompt's last tokens; -1 keeps as many as the context has room for.
    truncate_prompt_tokens: int | None = None
    # Share cached prefixes only with the tenant's requests that have the same one.
    cache_salt: str | None = None
    # The text begins with the prompt's.
    echo: bool = False
    # Among its tenant's requests the lowest goes first.
    priority: int = 0
    # What the answer must be, behind its reasoning.
    form: AnswerForm | None = None
    # Texts that it must not hold.
    bad_words: tuple[str, ...] = ()
    # It ends of itself no earlier.
    min_tokens: int = 0
    # How the API that asks writes the answer, for the gateway that may go on with it.
    written: bytes = b""


class TextReading(Struct, frozen=True):
    """How an answer's tokens become text."""

    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    # A ReasoningStart.
    reasoning: str = ReasoningStart.NONE.value


@dataclass(frozen=True, slots=True)
class History:
    """What there is already of an answer that is gone on with."""

    received: "array[int]"
    # How it ended; None if it goes on.
    reason: FinishReason | None
    # Tokens that the client has.
    delivered: int
    # Some tokens were accepted in place of others that the seed gives.
    relaxed: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that was validated, and what its answer needs."""

    model: str
    request: TokenRequest
    new_transcript: Callable[[], Transcript]
    # Chain hashes of the prompt's full blocks, root first.
    block_hashes: Sequence[bytes]
    # What comes before the answer's text.
    echo: str = ""
    # None if the answer is more than text.
    text: TextReading | None = None
    # Names the stream, for workers and for its client; None and empty if it cannot be continued.
    stream: StreamTag | None = None
    stream_token: str = ""
    history: History | None = None

    def sibling(self, number: int) -> "Prepared":
        """The same for another answer to the prompt, with random numbers of its own."""
        sampling = self.request.sampling
        request = structs.replace(
            self.request,
            request_id=f"{self.request.request_id}-{number}",
            sampling=structs.replace(sampling, seed=settled_seed(sampling.seed + number)),
        )
        return replace(self, request=request, stream=None, stream_token="")


@dataclass(frozen=True, slots=True)
class _Encoded:
    token_ids: Sequence[int]
    shape: AnswerShape = UNSHAPED


class Intake:
    """Encodes one long prompt at a time, so that the memory for it stays bounded."""

    def __init__(self, catalog: Catalog, limits: LimitsConfig) -> None:
        self._catalog = catalog
        self._limits = limits
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="intake")
        self._grammars = GrammarChecks()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()

    async def prepare(self, ask: Ask, cache_salt: bytes, share: Share) -> Prepared:
        """Raises InvalidRequest (naming the field), ContextExceeded, UnknownModel or NoWorker."""
        model = self._catalog.resolve(ask.model)
        limits, text = self._catalog.limits(model), self._catalog.text(model)
        check_sampling(ask.sampling, limits.vocabulary_size)
        validate_stop_strings(ask.stop_strings)
        check_stop_token_ids(ask.stop_token_ids, limits.vocabulary_size)
        validate_priority(ask.priority)
        if ask.cache_salt is not None:
            validate_cache_salt(ask.cache_salt)
        if ask.stop_strings and text.tokenizer is None:
            raise no_tokenizer(model, "stop")
        with span("gateway.encode"):
            encoded = await self._encode(ask.prompt, model)
            token_ids = truncated(encoded.token_ids, ask.truncate_prompt_tokens, ask.max_tokens, limits)
            max_tokens = completion_room(len(token_ids), ask.max_tokens, limits)
            block_hashes = await self._run(len(token_ids), lambda: chain_hashes(token_ids, cache_salt))
        request = TokenRequest(
            request_id=ask.request_id,
            token_ids=token_ids,
            sampling=ask.sampling,
            stop=StopConditions(max_tokens, ask.stop_token_ids, ask.ignore_eos),
            cache_salt=cache_salt,
            share=share,
            constraint=await self._constraint(ask, encoded.shape, max_tokens, text.tokenizer),
        )
        token_bytes = text.tokenizer.token_bytes if text.tokenizer is not None else no_text
        new_transcript = partial(
            Transcript,
            token_bytes,
            ask.stop_strings,
            encoded.shape.reasoning,
            include_stop_string=ask.include_stop_string,
            tools=encoded.shape.calls,
        )
        echo = _echo(ask.prompt, encoded.token_ids, token_ids, text.tokenizer) if ask.echo else ""
        reading = TextReading(ask.stop_strings, ask.include_stop_string, encoded.shape.reasoning.value)
        plain = encoded.shape.calls is None
        return Prepared(model, request, new_transcript, block_hashes, echo, reading if plain else None)

    async def count(self, model: str, prompt: Prompt) -> Sequence[int]:
        """Token ids of the prompt, as `prepare` would encode it. Raises as it does."""
        encoded = await self._encode(prompt, self._catalog.resolve(model))
        return encoded.token_ids

    async def _constraint(
        self, ask: Ask, shape: AnswerShape, max_tokens: int, tokenizer: Tokenizer | None
    ) -> Constraint | None:
        """Raises InvalidRequest naming the field."""
        form = await self._grammars.in_lark(ask.form) if isinstance(ask.form, GrammarForm) else ask.form
        constraint = constraint_for(form, shape, tokenizer)
        if constraint is not None:
            await self._grammars.check(constraint.grammar or "", "tools" if form is None else form.field)
        if form is not None:
            # Behind the check, which bounds how much there is to encode.
            check_room(form, max_tokens, tokenizer)
        return with_bans(constraint, ask.bad_words, ask.min_tokens, max_tokens, tokenizer)

    async def _encode(self, prompt: Prompt, model: str) -> _Encoded:
        limits, text = self._catalog.limits(model), self._catalog.text(model)
        size = self._size(prompt)

        def encode() -> _Encoded:
            encoded = _encoded(prompt, model, text, limits)
            if size > HUGE_PROMPT:
                release_freed_memory()
            return encoded

        return await self._run(size, encode)

    async def _run(self, size: int, work: Callable[[], ResultT]) -> ResultT:
        if size <= LONG_PROMPT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _size(self, prompt: Prompt) -> int:
        """Characters or token ids. Raises InvalidRequest if they are too many to be worth encoding."""
        if isinstance(prompt, TokenPrompt):
            return len(prompt.token_ids)
        if isinstance(prompt, TextPrompt):
            size, field = len(prompt.text), "prompt"
        else:
            size, field = prompt.characters, "messages"
        if size > self._limits.prompt_characters:
            limit = self._limits.prompt_characters
            raise InvalidRequest(f"the prompt has {size} characters, the limit is {limit}", field=field)
        return size


def _encoded(prompt: Prompt, model: str, text: ModelText, limits: ModelLimits) -> _Encoded:
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
    rendered = text.chat.render(prompt.messages, prompt.options, prompt.toolbox)
    shape = AnswerShape(rendered.reasoning, prompt.toolbox, rendered.tools)
    return _Encoded(array("I", rendered.token_ids), shape)


def _echo(prompt: Prompt, encoded: Sequence[int], kept: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """The text of the prompt, or of what was kept of it; as its client wrote it, if that is all of it."""
    if isinstance(prompt, TextPrompt) and len(kept) == len(encoded):
        return prompt.text
    if tokenizer is None:
        raise InvalidRequest("a prompt of token ids has no text without a tokenizer", field="echo")
    return tokenizer.spell(kept)


def no_tokenizer(model: str, field: str) -> InvalidRequest:
    return InvalidRequest(f"{model!r} is served without a tokenizer: send token ids", field=field)


def settled(sampling: Sampling, seed: int | None) -> Sampling:
    """With what the client left to us: the seed, and how drafts may be used. seed: None if the client gave none."""
    drafts = settled_draft_use(sampling, seeded=seed is not None)
    return structs.replace(sampling, seed=settled_seed(seed), drafts=drafts)


def settled_seed(given: int | None) -> int:
    """The seed as an unsigned 64-bit key; a random one if the client gave none."""
    return secrets.randbits(64) if given is None else given % 2**64
