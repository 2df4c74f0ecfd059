"""Tails: the few tokens of a prompt after its cached KV, which engines compute like requests that decode."""

# After a long context, more tokens than this need fewer multiplications as a prompt than as decode rows.
MOST_TOKENS = 128


def is_tail(uncached_tokens: int, cached_blocks: int) -> bool:
    """Whether so few tokens remain after cached blocks that computing them does not delay requests that decode."""
    return cached_blocks > 0 and uncached_tokens <= MOST_TOKENS
