"""Attention of long prompts that leaves out what hardly counts, as it travels from the gateway to the engine."""

import msgspec

from mesh.errors import InvalidRequest

FIELD = "sparse_prefill"
# Positions are 32-bit.
MAX_FROM_TOKENS = 2**31 - 1


class SparsePrefill(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens of a prompt attend sparsely, and how much of their attention is kept.

    Their KV depends on it, and so does the chain of block hashes from the first of them on (`mesh.blocks`).
    """

    # Tokens with fewer before them are computed exactly.
    from_tokens: int
    # The least share of the attention that is kept, as a chunk's last queries show it; between 0 and 1.
    recall: float


def sparse_part(start: int, end: int, from_tokens: int | None) -> int:
    """How many of the tokens at positions [start, end) are attended to sparsely; None: none are."""
    return 0 if from_tokens is None else max(0, end - max(start, from_tokens))


def check_sparse_prefill(sparse: SparsePrefill) -> None:
    """Raises InvalidRequest for numbers that are none of ours."""
    if not (0 <= sparse.from_tokens <= MAX_FROM_TOKENS and 0 < sparse.recall < 1):
        raise InvalidRequest("from_tokens must be a position, and recall between 0 and 1", field=FIELD)
