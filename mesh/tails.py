"""Few tokens that are left of a prompt behind cached KV: engines compute them as requests that decode."""

# Behind a long context more of them take fewer multiplications as a prompt than as rows that decode.
MOST_TOKENS = 128


def is_tail(uncached_tokens: int, cached_blocks: int) -> bool:
    """Whether so few tokens are left behind cached blocks that they hold up nobody who decodes."""
    return cached_blocks > 0 and uncached_tokens <= MOST_TOKENS
