"""How tokens are drawn and when that ends, and what of both is accepted: the gateway and the workers ask here."""

from collections.abc import Sequence

import msgspec

from mesh.errors import InvalidRequest

MAX_TEMPERATURE = 100.0
MAX_TOP_K = 2**31 - 1
MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 256
# Token ids travel in 32 bits.
LARGEST_VOCABULARY = 2**32


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the next token is drawn. Temperature 0 is greedy, top_k 0 keeps all tokens."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    # Key of the random numbers, an unsigned 64-bit integer.
    seed: int = 0
    # Report log probabilities with this many alternatives; None reports nothing.
    top_logprobs: int | None = None


class StopConditions(msgspec.Struct, frozen=True, array_like=True):
    """When generation ends, in token ids."""

    # Tokens to generate at the most, at least 1.
    max_tokens: int
    # Generation ends with the first of these. The engine adds the model's own end-of-sequence ids unless ignore_eos.
    token_ids: Sequence[int] = ()
    ignore_eos: bool = False


def check_sampling(sampling: Sampling) -> None:
    """Raises InvalidRequest naming the first field that is out of range; NaN and infinities are."""
    if not 0 <= sampling.temperature <= MAX_TEMPERATURE:
        raise _out_of_range("temperature", sampling.temperature, f"between 0 and {MAX_TEMPERATURE:g}")
    if not 0 < sampling.top_p <= 1:
        raise _out_of_range("top_p", sampling.top_p, "above 0 and at most 1")
    if not 0 <= sampling.top_k <= MAX_TOP_K:
        raise _out_of_range("top_k", sampling.top_k, "at least 0 (0 keeps all tokens)")
    if sampling.top_logprobs is not None and not 0 <= sampling.top_logprobs <= MAX_TOP_LOGPROBS:
        raise _out_of_range("top_logprobs", sampling.top_logprobs, f"between 0 and {MAX_TOP_LOGPROBS}")


def check_stop_token_ids(token_ids: Sequence[int], vocabulary_size: int | None) -> None:
    """Raises InvalidRequest for too many, and for those that the model lacks."""
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"stop_token_ids holds more than {MAX_STOP_TOKEN_IDS} ids", field="stop_token_ids")
    check_token_ids(token_ids, vocabulary_size, field="stop_token_ids")


def check_token_ids(token_ids: Sequence[int], vocabulary_size: int | None, *, field: str) -> None:
    """Raises InvalidRequest unless every id is one of the model's; `vocabulary_size` is None if that is not known."""
    if not token_ids:
        return
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0:
        raise InvalidRequest(f"{field} holds {lowest}: token ids are not negative", field=field)
    size = vocabulary_size or LARGEST_VOCABULARY
    if highest >= size:
        raise InvalidRequest(f"{field} holds {highest}: the model's token ids are below {size}", field=field)


def _out_of_range(field: str, value: float, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{field} must be {allowed}, not {value:g}", field=field)
