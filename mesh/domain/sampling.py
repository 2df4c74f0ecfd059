"""How tokens are sampled and when generation ends, with the checks that both the gateway and the workers apply."""

from collections.abc import Mapping, Sequence
from enum import IntEnum

import msgspec

from mesh.errors import InvalidRequest

MAX_TEMPERATURE = 100.0
MAX_TOP_K = 2**31 - 1
MAX_TOP_LOGPROBS = 20
# Most numbers in the log probabilities of a prompt: some 2 MB, and twice that with their ranks and ids.
MAX_PROMPT_LOGPROBS = 1 << 18
# OpenAI's range.
MAX_PENALTY = 2.0
# Keeps logits far from the limits of 32-bit floats.
MAX_REPETITION_PENALTY = 100.0
MAX_LOGIT_BIASES = 300
MAX_LOGIT_BIAS = 100.0
MAX_STOP_TOKEN_IDS = 256
# Token ids travel as 32-bit numbers.
LARGEST_VOCABULARY = 2**32


class DraftUse(IntEnum):
    """What a request asks of drafts. Its worker may have none, or accept them only strictly. The numbers are those on
    the wire.
    """

    # The gateway settles it (`settled_draft_use`); workers read it as STRICT.
    UNSPECIFIED = 0
    # No drafts: tokens are drawn one by one.
    OFF = 1
    # Drafts change no token: the answer is the one without drafts.
    STRICT = 2
    # While the model thinks, a worker may accept drafts that are only near the likeliest token.
    RELAXED = 3


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the next token is drawn. Temperature 0 is greedy, top_k 0 keeps all tokens."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    # Key of the random number generator, an unsigned 64-bit integer.
    seed: int = 0
    # Report log probabilities with this many alternatives; None reports nothing.
    top_logprobs: int | None = None
    # Keep tokens whose probability is at least this share of the likeliest one's; 0 keeps all.
    min_p: float = 0.0
    # Subtracted from the logit of each token generated so far: once if it occurs at all, and once per occurrence.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Positive logits of tokens in the prompt or generated so far are divided by this, negative ones multiplied; 1
    # changes none.
    repetition_penalty: float = 1.0
    # Added to the logits of these token ids, after the penalties.
    logit_bias: dict[int, float] = {}
    # A plain number rather than a DraftUse, so that a value unknown to this version can be refused.
    drafts: int = DraftUse.UNSPECIFIED
    # Report log probabilities of the prompt's own tokens, with this many alternatives; None reports nothing.
    prompt_logprobs: int | None = None

    @property
    def counts_tokens(self) -> bool:
        """Whether the request's tokens so far change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def changes_logits(self) -> bool:
        return self.counts_tokens or bool(self.logit_bias)


class StopConditions(msgspec.Struct, frozen=True, array_like=True):
    """When generation ends, in token ids."""

    # Most tokens to generate, at least 1.
    max_tokens: int
    # Generation ends at the first of these. The engine adds the model's own end-of-sequence ids unless ignore_eos is
    # set.
    token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def ends(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end generation. eos_token_ids: the model's own."""
        return frozenset(self.token_ids) if self.ignore_eos else eos_token_ids.union(self.token_ids)


def settled_draft_use(sampling: Sampling, constrained: bool) -> int:
    """The draft use of a request. If it does not say, it is STRICT if penalties, a bias or a constraint are in use,
    which relaxed drafts would harm, and RELAXED otherwise.

    constrained: whether the answer is constrained.
    """
    if sampling.drafts != DraftUse.UNSPECIFIED:
        return sampling.drafts
    return DraftUse.STRICT if constrained or sampling.changes_logits else DraftUse.RELAXED


def check_sampling(sampling: Sampling, vocabulary_size: int | None) -> None:
    """Raises InvalidRequest naming the first field that is out of range; NaN and infinities always are.

    `vocabulary_size` is None if it is not known.
    """
    if not 0 <= sampling.temperature <= MAX_TEMPERATURE:
        raise _out_of_range("temperature", sampling.temperature, f"between 0 and {MAX_TEMPERATURE:g}")
    if not 0 < sampling.top_p <= 1:
        raise _out_of_range("top_p", sampling.top_p, "above 0 and at most 1")
    if not 0 <= sampling.top_k <= MAX_TOP_K:
        raise _out_of_range("top_k", sampling.top_k, f"between 0 (which keeps all tokens) and {MAX_TOP_K}")
    check_alternatives("top_logprobs", sampling.top_logprobs)
    check_alternatives("prompt_logprobs", sampling.prompt_logprobs)
    if not 0 <= sampling.min_p <= 1:
        raise _out_of_range("min_p", sampling.min_p, "between 0 and 1")
    for field in ("presence_penalty", "frequency_penalty"):
        if not abs(penalty := getattr(sampling, field)) <= MAX_PENALTY:
            raise _out_of_range(field, penalty, f"between -{MAX_PENALTY:g} and {MAX_PENALTY:g}")
    if not 0 < sampling.repetition_penalty <= MAX_REPETITION_PENALTY:
        allowed = f"above 0 and at most {MAX_REPETITION_PENALTY:g} (1 changes nothing)"
        raise _out_of_range("repetition_penalty", sampling.repetition_penalty, allowed)
    if sampling.drafts not in list(DraftUse):
        raise _out_of_range("drafts", sampling.drafts, "a DraftUse that this version knows")
    _check_logit_bias(sampling.logit_bias, vocabulary_size)


def check_alternatives(field: str, alternatives: int | None) -> None:
    """Raises InvalidRequest naming `field` if this many alternatives are not reported."""
    if alternatives is not None and not 0 <= alternatives <= MAX_TOP_LOGPROBS:
        raise _out_of_range(field, alternatives, f"between 0 and {MAX_TOP_LOGPROBS}")


def check_prompt_logprobs(sampling: Sampling, prompt_tokens: int) -> None:
    """Raises InvalidRequest if prompts of `prompt_tokens` tokens in total are too long for the log probabilities that
    are asked for.
    """
    if sampling.prompt_logprobs is None:
        return
    most = MAX_PROMPT_LOGPROBS // (1 + sampling.prompt_logprobs)
    if prompt_tokens > most:
        asked = f"log probabilities of prompts with {sampling.prompt_logprobs} alternatives"
        wrong = f"{asked} are given for up to {most} tokens, and here are {prompt_tokens}"
        raise InvalidRequest(wrong, field="prompt_logprobs")


def check_stop_token_ids(token_ids: Sequence[int], vocabulary_size: int | None) -> None:
    """Raises InvalidRequest if there are too many ids, or ids that the model lacks."""
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"stop_token_ids holds more than {MAX_STOP_TOKEN_IDS} ids", field="stop_token_ids")
    check_token_ids(token_ids, vocabulary_size, field="stop_token_ids")


def check_token_ids(token_ids: Sequence[int], vocabulary_size: int | None, *, field: str) -> None:
    """Raises InvalidRequest unless every id is in the vocabulary; `vocabulary_size` is None if it is not known."""
    if not token_ids:
        return
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0:
        raise InvalidRequest(f"{field} holds {_shown(lowest)}: token ids are not negative", field=field)
    size = vocabulary_size or LARGEST_VOCABULARY
    if highest >= size:
        raise InvalidRequest(f"{field} holds {_shown(highest)}: the model's token ids are below {size}", field=field)


def check_logit_bias_count(count: int) -> None:
    """Raises InvalidRequest if there are too many biases. Check before converting any."""
    if count > MAX_LOGIT_BIASES:
        raise InvalidRequest(f"logit_bias names {count} tokens, the limit is {MAX_LOGIT_BIASES}", field="logit_bias")


def _check_logit_bias(logit_bias: Mapping[int, float], vocabulary_size: int | None) -> None:
    check_logit_bias_count(len(logit_bias))
    check_token_ids(list(logit_bias), vocabulary_size, field="logit_bias")
    for token_id, bias in logit_bias.items():
        if not abs(bias) <= MAX_LOGIT_BIAS:
            allowed = f"between -{MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}"
            raise InvalidRequest(
                f"logit_bias of token {token_id} must be {allowed}, not {_shown(bias)}", field="logit_bias"
            )


def _out_of_range(field: str, value: float, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{field} must be {allowed}, not {_shown(value)}", field=field)


def _shown(value: float) -> str:
    """The value, fit for a message: an integer that a client sent may have any number of digits."""
    return "a number beyond 1e15" if abs(value) > 1e15 else str(value) if isinstance(value, int) else f"{value:g}"
