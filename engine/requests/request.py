"""A request inside the engine."""

from dataclasses import dataclass, field

from engine.batch import History
from engine.constraints.answer import AnswerMasks
from engine.protocol.messages import PushTarget
from engine.requests.progress import Progress
from engine.requests.thinking import ThinkingPhase
from mesh.blocks import BLOCK_TOKENS, block_hash, parent_hash
from mesh.domain.outputs import PromptLogprobs
from mesh.domain.sampling import Sampling
from mesh.domain.shares import ONE_TENANT, Share
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.domain.targets import StoreTarget
from mesh.observe.spans import span
from mesh.observe.tracing import TraceContext


class Stages:
    """One stage follows another, until the request ends. Outside traces it keeps nothing."""

    __slots__ = ("_stage", "context")

    def __init__(self, traceparent: str | None) -> None:
        self.context = TraceContext.parse(traceparent)
        self._stage: span | None = None

    def enter(self, name: str, **attributes: object) -> None:
        """End the stage before, and begin this one."""
        self.end()
        if self.context is not None:
            self._stage = span(name, **attributes).begin(self.context)

    def end(self) -> None:
        """The request has ended, or goes on as another stage."""
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.end()


class PromptScores:
    """Scores of one request's prompt, until its first token. The prompt is computed whole: cached tokens have no
    logits.
    """

    def __init__(self, alternatives: int) -> None:
        self.alternatives = alternatives
        self._parts: list[PromptLogprobs] = []

    def add(self, start: int, part: PromptLogprobs) -> None:
        """What the row that begins at `start` computed."""
        if not start:
            # A preempted prompt begins again.
            self._parts.clear()
        self._parts.append(part)

    def whole(self) -> PromptLogprobs:
        return PromptLogprobs.joined(self.alternatives, self._parts)


@dataclass(slots=True, eq=False)
class Request:
    """Filled from a Submit; from then on only the engine writes it."""

    key: int
    # For logs.
    request_id: str
    # Its tokens, KV and blocks.
    progress: Progress
    prompt_tokens: int
    # Number of tokens, prompt included, at which generation ends.
    limit: int
    # Generation ends with one of these.
    stop_token_ids: frozenset[int]
    sampling: Sampling
    # The most tokens that are guessed after each that it draws; 0 if its tokens are drawn one by one.
    most_drafts: int
    # Whether it thinks, if its drafts are accepted relaxedly then; None if always strictly.
    phase: ThinkingPhase | None
    # For the rows that draw; None if `sampling` counts no tokens.
    history: History | None
    # Root of its chain of block hashes: the tenant's salt, hashed.
    root: bytes
    # Arrival batch, and order within it.
    arrival: tuple[int, int]
    sparse: SparsePrefill | None = None
    # Tokens with at least this many before them are attended to sparsely by this engine; None if none are.
    sparse_from: int | None = None
    share: Share = ONE_TENANT
    # It has had its last output; its blocks are given back once no step in flight writes to them.
    ended: bool = False
    # Prompt tokens found in a cache when the request was first admitted, here or by the prefill worker; None before.
    cached_tokens: int | None = None
    # How many of them came from a store, and how many from this rank's host memory.
    store_cached_tokens: int = 0
    host_cached_tokens: int = 0
    # When it is first admitted, it waits for its KV from a prefill worker, or for a prefix from the store in `fetch`.
    remote_prefill: bool = False
    sender_slot_bytes: int | None = None
    sender_draft_layers: int | None = None
    attempt: int = 0
    fetch: StoreTarget | None = None
    # Where its KV goes; None if it stays here.
    push: PushTarget | None = None
    # Which tokens its next rows may draw; None if any.
    masks: AnswerMasks | None = None
    # Set until its first token if its prompt's tokens are to be scored; nothing of the prompt is taken from a cache
    # then.
    prompt_scores: PromptScores | None = None
    stages: Stages = field(default_factory=lambda: Stages(None))
    # Hashes of the leading full blocks, computed as far as they were needed.
    _hashes: list[bytes] = field(default_factory=list)

    @property
    def has_first_token(self) -> bool:
        return len(self.progress.token_ids) > self.prompt_tokens

    def receive_first_token(self, token_id: int, drafts_end: int | None) -> None:
        """The prefill worker drew this token, and has reported the scores of the prompt. drafts_end: see Progress."""
        if drafts_end is not None:
            self.progress.lack_drafts(drafts_end)
        self.prompt_scores = None
        self.progress.received([token_id])
        if self.masks is not None:
            self.masks.follow([token_id])

    @property
    def will_end(self) -> bool:
        """Whether it ends with the rows in flight at the latest: no step takes it on again."""
        return self.progress.tokens_at_least >= self.limit

    @property
    def draws(self) -> int:
        """While it decodes, the most tokens that its next row yields; 0 if rows in flight may bring its last."""
        if not self.most_drafts:
            return 1
        progress = self.progress
        in_flight = progress.tokens_at_least > len(progress.token_ids)
        drafts = min(progress.guesses_in_flight, self.most_drafts) if in_flight else len(progress.drafts)
        return min(1 + drafts, self.limit - progress.tokens_at_most)

    @property
    def needs_block(self) -> bool:
        """While it decodes, whether its next row computes a token that has no block yet, or guesses one."""
        progress = self.progress
        if not self.most_drafts:
            return progress.computed_at_most >= progress.covered
        return progress.left == 1 and self.reach(progress.computed_at_most + self.draws) > progress.covered

    def reach(self, tokens: int) -> int:
        """How many tokens need room in its blocks when `tokens` of them are computed: drafts after them count too.

        So does the first token of a landed prompt, which is computed in one row with those that are computed again. The
        last token of a request is never computed.
        """
        ahead = self.most_drafts or int(self.remote_prefill and self.progress.rewind > 0)
        return max(tokens, min(tokens + ahead, self.limit - 1))

    @property
    def thinking(self) -> bool | None:
        """`Row.thinking` for a row after all tokens."""
        return None if self.phase is None else self.phase.after(self.progress.token_ids)

    @property
    def is_pushed(self) -> bool:
        return self.push is not None

    @property
    def matchable_blocks(self) -> int:
        """Leading full blocks that may come from a cache. The last token is always computed, for its logits."""
        return (len(self.progress.token_ids) - 1) // BLOCK_TOKENS

    def content(self, index: int) -> bytes | None:
        """Hash of the block of that index; None if it is not full."""
        full_blocks = len(self.progress.token_ids) // BLOCK_TOKENS
        return self.full_block_hashes(index + 1)[index] if index < full_blocks else None

    def full_block_hashes(self, blocks: int) -> list[bytes]:
        """Hashes of the first `blocks` blocks, which must be full."""
        hashes = self._hashes
        while len(hashes) < blocks:
            start = len(hashes) * BLOCK_TOKENS
            parent = parent_hash(hashes[-1] if hashes else self.root, len(hashes), self.sparse)
            hashes.append(block_hash(parent, self.progress.token_ids[start : start + BLOCK_TOKENS]))
        return hashes[:blocks]
