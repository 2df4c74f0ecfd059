"""The limits of what a client may ask for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mesh.domain.sparse_prefill import FIELD, SparsePrefill
from mesh.errors import ContextExceeded, InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_CACHE_SALT_CHARACTERS = 256
# Most messages and calls in one chat. Each takes the event loop about 10 us, however short it is, and a body has room
# for a million.
MAX_MESSAGES = 16_384


@dataclass(frozen=True, slots=True)
class FieldNames:
    """An API's names of these fields, for errors."""

    prompt: str = "prompt"
    max_tokens: str = "max_tokens"
    # Whether chats are sent as `messages`. If not, an error in a message counts as an error of the prompt.
    has_messages: bool = True

    @contextmanager
    def given(self) -> Iterator[None]:
        """Give errors of the block the API's own name of the prompt's field."""
        try:
            yield
        except InvalidRequest as error:
            if self.has_messages or not error.metadata.get("field", "").startswith("messages"):
                raise
            raise type(error)(error.message, field=self.prompt) from error


OUR_NAMES = FieldNames()


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The largest request that a worker of the model accepts."""

    context_tokens: int
    vocabulary_size: int


def completion_room(
    prompt_tokens: int, max_tokens: int | None, limits: ModelLimits, names: FieldNames = OUR_NAMES
) -> int:
    """Most tokens to generate; `max_tokens` None asks for all that the context leaves.

    Raises ContextExceeded if prompt and completion do not fit, InvalidRequest if `max_tokens` is below 1.
    """
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequest(f"{names.max_tokens} must be at least 1, not {max_tokens}", field=names.max_tokens)
    room = limits.context_tokens - prompt_tokens
    if room < 1:
        raise ContextExceeded(
            f"the prompt has {prompt_tokens} tokens, and the context of {limits.context_tokens} leaves no room for an "
            "answer: shorten the prompt",
            field=names.prompt,
        )
    if max_tokens is not None and max_tokens > room:
        raise ContextExceeded(
            f"the prompt's {prompt_tokens} tokens and {names.max_tokens}={max_tokens} exceed the context of "
            f"{limits.context_tokens}: shorten the prompt or ask for at most {room}",
            field=names.max_tokens,
        )
    return room if max_tokens is None else max_tokens


def truncated(token_ids: Sequence[int], keep: int | None, max_tokens: int | None, limits: ModelLimits) -> Sequence[int]:
    """The last `keep` tokens; None keeps all, -1 those that leave room for `max_tokens` more in the context.

    Raises InvalidRequest for any other `keep` below 1.
    """
    if keep is None:
        return token_ids
    if keep == -1:
        keep = max(1, limits.context_tokens - (max_tokens or 1))
    if keep < 1:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or at least 1, not {keep}", field="truncate_prompt_tokens"
        )
    return token_ids[-keep:]


def settled_sparse_prefill(
    asked: bool | None, offered: SparsePrefill | None, prompt_tokens: int
) -> SparsePrefill | None:
    """How the prompt's attention is computed; None means exactly. `offered` is the setting of the model's workers.

    A prompt below the threshold is exact, and so is all that is generated after it, also on another worker. Raises
    InvalidRequest if the client asks for sparse prefill and the workers do not offer it.
    """
    if asked and offered is None:
        raise InvalidRequest(
            "the model's workers do not offer sparse prefill: leave it out, or set engine.sparse_prefill.recall alike"
            " on all that compute prompts",
            field=FIELD,
        )
    if asked is False or offered is None or prompt_tokens <= offered.from_tokens:
        return None
    return offered


def validate_cache_salt(cache_salt: str) -> None:
    """Raises InvalidRequest for an empty, overlong or malformed one."""
    if not 0 < len(cache_salt) <= MAX_CACHE_SALT_CHARACTERS:
        allowed = f"between 1 and {MAX_CACHE_SALT_CHARACTERS} characters"
        raise InvalidRequest(f"cache_salt must have {allowed}, not {len(cache_salt)}", field="cache_salt")
    validate_text(cache_salt, field="cache_salt")


def validate_priority(priority: int) -> None:
    """Raises InvalidRequest if the priority does not fit a signed integer of 32 bits."""
    if not -(2**31) <= priority < 2**31:
        raise InvalidRequest(f"priority {priority} is no 32-bit integer", field="priority")


def validate_message_count(count: int, *, field: str) -> None:
    """Raises InvalidRequest if there are too many messages; calls count as messages. Check before converting any."""
    if count > MAX_MESSAGES:
        raise InvalidRequest(f"there are {count} messages and calls, the limit is {MAX_MESSAGES}", field=field)


def validate_stop_strings(strings: Sequence[str]) -> None:
    """Raises InvalidRequest for too many of them, and for empty, overlong or malformed ones."""
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop holds {len(strings)} strings, the limit is {MAX_STOP_STRINGS}", field="stop")
    for string in strings:
        if not string:
            raise InvalidRequest("stop holds an empty string", field="stop")
        if len(string) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(f"a stop string is longer than {MAX_STOP_CHARACTERS} characters", field="stop")
        validate_text(string, field="stop")


def validate_text(text: str, *, field: str) -> None:
    """Raises InvalidRequest for text that has no UTF-8 form: lone surrogates, which JSON escapes can smuggle in."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field} is not valid Unicode: lone surrogate at {error.start}", field=field) from error
