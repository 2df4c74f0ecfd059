"""A request inside the engine."""

from array import array
from dataclasses import dataclass, field

from engine.protocol.messages import Fetch, Push, Sampling
from mesh.blocks import BLOCK_TOKENS, block_hash


@dataclass(slots=True, eq=False)
class Request:
    """Filled from a Submit; from then on only the engine writes it."""

    key: int
    # For logs.
    request_id: str
    # The prompt, then what was generated.
    token_ids: list[int]
    prompt_tokens: int
    # Length of token_ids at which generation ends.
    limit: int
    # Generation ends with one of these.
    stop_token_ids: frozenset[int]
    sampling: Sampling
    # Root of its chain of block hashes.
    root: bytes
    # Arrival batch, and order within it.
    arrival: tuple[int, int]
    # Leading tokens whose KV is written, or will be by the steps under way.
    computed: int = 0
    # Steps under way that compute a part of it.
    rows_under_way: int = 0
    # Of those, how many draw a token of it; the latest is this row of the step launched last.
    draws_under_way: int = 0
    drawing_row: int | None = None
    # Nobody waits for it; its blocks are given back once no step under way writes to them.
    ended: bool = False
    # Held blocks in order of position; an array, so that backends can read it as a buffer. Empty while waiting.
    block_ids: "array[int]" = field(default_factory=lambda: array("i"))
    # Of block_ids, how many leading ones were matched in the pool or registered with it.
    registered_blocks: int = 0
    # Prompt tokens that neither this engine computed when the request was first admitted, nor the prefill worker.
    cached_tokens: int | None = None
    # Of those, what came from a store.
    store_cached_tokens: int = 0
    # As submitted: when it is admitted first, it waits for its KV from a prefill worker, or for a prefix from a store.
    lands: bool = False
    sender_slot_bytes: int | None = None
    attempt: int = 0
    fetch: Fetch | None = None
    # Where its KV goes.
    push: Push | None = None
    # Of the leading full blocks, as far as they were needed.
    _hashes: list[bytes] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens known, and those that steps under way draw."""
        return len(self.token_ids) + self.draws_under_way

    @property
    def left(self) -> int:
        """Tokens to compute before it can draw another."""
        return self.length - self.computed

    @property
    def has_first_token(self) -> bool:
        return len(self.token_ids) > self.prompt_tokens

    @property
    def is_pushed(self) -> bool:
        return self.push is not None

    @property
    def matchable_blocks(self) -> int:
        """Leading full blocks that need not be computed. The last token always is: its logits are waited for."""
        return (len(self.token_ids) - 1) // BLOCK_TOKENS

    def full_block_hashes(self, blocks: int) -> list[bytes]:
        """Hashes of the first `blocks` blocks, which must be full."""
        hashes = self._hashes
        while len(hashes) < blocks:
            start = len(hashes) * BLOCK_TOKENS
            parent = hashes[-1] if hashes else self.root
            hashes.append(block_hash(parent, self.token_ids[start : start + BLOCK_TOKENS]))
        return hashes[:blocks]

    def forget_blocks(self) -> None:
        """Back to nothing computed; tokens stay."""
        self.block_ids = array("i")
        self.computed = 0
        self.registered_blocks = 0
