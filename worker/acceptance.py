"""Refuses requests that no rank could ever run, before a rank gets them. Pure; both kinds of worker use it."""

from collections.abc import Sequence

from engine.protocol.messages import Ready
from mesh.blocks import BLOCK_TOKENS
from mesh.errors import ContextExceeded, InvalidRequest

MAX_SALT_BYTES = 256


def check_prompt(token_ids: Sequence[int], max_tokens: int, ready: Ready) -> None:
    """Raises InvalidRequest or ContextExceeded if the rank could never compute the prompt and `max_tokens` after it."""
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
    """Raises InvalidRequest if the salt is too long."""
    if len(cache_salt) > MAX_SALT_BYTES:
        raise InvalidRequest(f"cache_salt has at most {MAX_SALT_BYTES} bytes", field="cache_salt")
