"""What a client asked for, validated, in token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

from mesh.errors import ContextExceeded, InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_TOP_LOGPROBS = 20
MAX_TEMPERATURE = 100.0
MAX_TOP_K = 2**31 - 1
# Token ids travel in 32 bits.
LARGEST_VOCABULARY = 2**32


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. Temperature 0 is greedy, top_k 0 keeps all tokens."""

    temperature: float
    seed: int
    top_p: float = 1.0
    top_k: int = 0
    # Report log probabilities with this many alternatives; None reports nothing.
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation, as the dispatcher takes it; the `validate_` functions below have passed."""

    request_id: str
    model: str
    # Token ids.
    prompt: Sequence[int]
    sampling: Sampling
    # At least 1; prompt and max_tokens fit the context.
    max_tokens: int
    # On the event loop's clock, in seconds.
    deadline: float
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    # Root of the cache's hash chain: tenants with different salts share nothing.
    cache_salt: bytes = b""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the workers of one model take. `vocabulary_size` is None where they do not say."""

    context_tokens: int
    vocabulary_size: int | None


def completion_room(prompt_tokens: int, max_tokens: int | None, limits: ModelLimits) -> int:
    """Tokens to generate at the most; None asks for all that the context leaves.

    Raises ContextExceeded where prompt and completion do not fit, InvalidRequest for a negative or zero `max_tokens`.
    """
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {max_tokens}", field="max_tokens")
    room = limits.context_tokens - prompt_tokens
    if room < 1:
        raise ContextExceeded(
            f"the prompt has {prompt_tokens} tokens, and the context of {limits.context_tokens} leaves no room for an "
            "answer: shorten the prompt",
            field="prompt",
        )
    if max_tokens is not None and max_tokens > room:
        raise ContextExceeded(
            f"the prompt's {prompt_tokens} tokens and max_tokens={max_tokens} exceed the context of "
            f"{limits.context_tokens}: shorten the prompt or ask for at most {room}",
            field="max_tokens",
        )
    return room if max_tokens is None else max_tokens


def validate_token_ids(token_ids: Sequence[int], limits: ModelLimits, *, field: str) -> None:
    """Raises InvalidRequest unless every id is one of the model's."""
    if not token_ids:
        return
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0:
        raise InvalidRequest(f"{field} holds {lowest}: token ids are not negative", field=field)
    size = limits.vocabulary_size or LARGEST_VOCABULARY
    if highest >= size:
        raise InvalidRequest(f"{field} holds {highest}: the model's token ids are below {size}", field=field)


def validate_sampling(sampling: Sampling) -> None:
    """Raises InvalidRequest naming the first field that is out of range; NaN and infinities are."""
    if not 0 <= sampling.temperature <= MAX_TEMPERATURE:
        raise _out_of_range("temperature", sampling.temperature, f"between 0 and {MAX_TEMPERATURE:g}")
    if not 0 < sampling.top_p <= 1:
        raise _out_of_range("top_p", sampling.top_p, "above 0 and at most 1")
    if not 0 <= sampling.top_k <= MAX_TOP_K:
        raise _out_of_range("top_k", sampling.top_k, "at least 0 (0 keeps all tokens)")
    if sampling.top_logprobs is not None and not 0 <= sampling.top_logprobs <= MAX_TOP_LOGPROBS:
        raise _out_of_range("top_logprobs", sampling.top_logprobs, f"between 0 and {MAX_TOP_LOGPROBS}")


def _out_of_range(field: str, value: float, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{field} must be {allowed}, not {value:g}", field=field)


def validate_stops(strings: Sequence[str], token_ids: Sequence[int], limits: ModelLimits) -> None:
    """Raises InvalidRequest for too many stops, for empty, overlong or malformed strings, and for unknown token ids."""
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop holds {len(strings)} strings, the limit is {MAX_STOP_STRINGS}", field="stop")
    for string in strings:
        if not string:
            raise InvalidRequest("stop holds an empty string", field="stop")
        if len(string) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(f"a stop string is longer than {MAX_STOP_CHARACTERS} characters", field="stop")
        validate_text(string, field="stop")
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"stop_token_ids holds more than {MAX_STOP_TOKEN_IDS} ids", field="stop_token_ids")
    validate_token_ids(token_ids, limits, field="stop_token_ids")


def validate_text(text: str, *, field: str) -> None:
    """Raises InvalidRequest for text that has no UTF-8 form: lone surrogates, which JSON escapes can smuggle in."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field} is not valid Unicode: lone surrogate at {error.start}", field=field) from error
