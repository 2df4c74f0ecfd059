"""The tokens of blocks, as a worker's service learns them from the requests that pass through it."""

import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mesh.blocks import BLOCK_TOKENS, block_hash, parent_hash, root_hash
from mesh.domain.requests import TokenRequest
from mesh.domain.sparse_prefill import SparsePrefill

_TOKENS = struct.Struct(f"<{BLOCK_TOKENS}I")


class BlockText(NamedTuple):
    """What a block holds: its tokens, 4 bytes each, and the root of its chain."""

    tokens: bytes
    root: bytes


@dataclass(slots=True)
class _Chain:
    """A live request's chain, as far as its tokens are known."""

    root: bytes
    sparse: SparsePrefill | None
    # The last full block, or the root; how many full blocks there are, and the tokens after them.
    last: bytes
    blocks: int
    tail: list[int]


class BlockTokens:
    """Remembers the last `most_coming` blocks of requests until a rank says that it holds them."""

    def __init__(self, most_coming: int) -> None:
        self._most_coming = most_coming
        self._coming: OrderedDict[bytes, BlockText] = OrderedDict()
        self._live: dict[int, _Chain] = {}

    def submitted(self, key: int, request: TokenRequest) -> None:
        root = root_hash(request.cache_salt)
        self._live[key] = chain = _Chain(root, request.sparse, root, 0, [])
        self._add(chain, request.token_ids)

    def generated(self, key: int, first_position: int, token_ids: Sequence[int]) -> None:
        """A request's tokens from this position on, prompt included."""
        chain = self._live.get(key)
        if chain is None:
            return
        known = chain.blocks * BLOCK_TOKENS + len(chain.tail)
        # Some may have been told before.
        self._add(chain, token_ids[max(known - first_position, 0) :] if first_position <= known else ())

    def followed(self, key: int, token_id: int) -> None:
        """A request's next token, which no rank reports: see `FirstToken`."""
        chain = self._live.get(key)
        if chain is not None:
            self._add(chain, [token_id])

    def ended(self, key: int) -> None:
        self._live.pop(key, None)

    def take(self, content: bytes) -> BlockText | None:
        """A rank holds this block now. None if no request told its tokens."""
        return self._coming.pop(content, None)

    def _add(self, chain: _Chain, token_ids: Sequence[int]) -> None:
        tokens = [*chain.tail, *token_ids]
        full = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
        for start in range(0, full, BLOCK_TOKENS):
            block = tokens[start : start + BLOCK_TOKENS]
            chain.last = block_hash(parent_hash(chain.last, chain.blocks, chain.sparse), block)
            chain.blocks += 1
            self._coming[chain.last] = BlockText(_TOKENS.pack(*block), chain.root)
            self._coming.move_to_end(chain.last)
        chain.tail = tokens[full:]
        while len(self._coming) > self._most_coming:
            self._coming.popitem(last=False)
