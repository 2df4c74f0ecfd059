"""What no rank could ever run, told before it gets there. Pure: used by the services of both kinds of worker."""

from collections.abc import Sequence
from math import isfinite

from engine.protocol.messages import Ready, Sampling
from mesh.blocks import BLOCK_TOKENS
from mesh.errors import ContextExceeded, InvalidRequest

MAX_TOP_LOGPROBS = 20
MAX_SALT_BYTES = 256


def check_prompt(token_ids: Sequence[int], max_tokens: int, ready: Ready) -> None:
    """Raises InvalidRequest or ContextExceeded where the rank can never compute it, and `max_tokens` after it."""
    if not token_ids:
        raise InvalidRequest("the prompt is empty: send at least one token", field="token_ids")
    if max(token_ids) >= ready.vocabulary_size:
        raise InvalidRequest(f"token ids must be from 0 to {ready.vocabulary_size - 1}", field="token_ids")
    tokens = len(token_ids) + max_tokens
    room = min(ready.context_tokens, ready.total_blocks * BLOCK_TOKENS)
    if tokens > room:
        raise ContextExceeded(
            f"{len(token_ids)} prompt tokens and max_tokens {max_tokens} make {tokens}, and this "
            f"worker has room for {room}: shorten the prompt or lower max_tokens",
            field="max_tokens",
        )


def check_salt(cache_salt: bytes) -> None:
    """Raises InvalidRequest."""
    if len(cache_salt) > MAX_SALT_BYTES:
        raise InvalidRequest(f"cache_salt has at most {MAX_SALT_BYTES} bytes", field="cache_salt")


def check_sampling(sampling: Sampling) -> None:
    """Raises InvalidRequest."""
    if not isfinite(sampling.temperature) or sampling.temperature < 0:
        raise InvalidRequest("temperature must be a finite number, 0 or more", field="sampling.temperature")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest("top_p must be more than 0 and at most 1", field="sampling.top_p")
    if sampling.top_logprobs is not None and sampling.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be at most {MAX_TOP_LOGPROBS}", field="sampling.top_logprobs")
