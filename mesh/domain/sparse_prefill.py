"""Sparse attention of long prompts, which skips positions that hardly count, as it travels from gateway to engine."""

import msgspec

from mesh.errors import InvalidRequest

FIELD = "sparse_prefill"
# Positions are 32-bit numbers.
MAX_FROM_TOKENS = 2**31 - 1


class SparsePrefill(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens of a prompt attend sparsely, and how much of their attention is kept.

    The KV of such tokens depends on both numbers, and so do the block hashes from the first of them on (`mesh.blocks`).
    """

    # Tokens with fewer tokens before them are computed exactly.
    from_tokens: int
    # Least share of the attention that is kept, estimated by a chunk's last queries; between 0 and 1.
    recall: float


def sparse_part(start: int, end: int, from_tokens: int | None) -> int:
    """How many of the tokens at positions [start, end) attend sparsely. from_tokens None: none do."""
    return 0 if from_tokens is None else max(0, end - max(start, from_tokens))


def check_sparse_prefill(sparse: SparsePrefill) -> None:
    """Raises InvalidRequest for numbers out of range."""
    if not (0 <= sparse.from_tokens <= MAX_FROM_TOKENS and 0 < sparse.recall < 1):
        raise InvalidRequest("from_tokens must be a position, and recall between 0 and 1", field=FIELD)
