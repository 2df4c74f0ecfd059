"""One step's work as plain data: what the batcher decides and a backend executes.

Structs of msgspec because hundreds are made in every step, and frozen dataclasses take ten times as long.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from engine.balance.report import BalanceReport
from engine.requests.thinking import ThinkTokens
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.outputs import Logprobs, PromptLogprobs
from mesh.domain.sampling import Sampling
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.domain.workers import WorkerSpeed
from transfer.memory import KvMemory

if TYPE_CHECKING:
    # Services import this module too, and they need no numpy.
    import numpy as np
    import numpy.typing as npt

    from engine.moves.host_slots import HostSlots


class History(msgspec.Struct, frozen=True):
    """The tokens of a request, for penalties on tokens that it already has."""

    # The request's key.
    key: int
    # How many of its first tokens are the prompt; the others were generated, here or on another worker.
    prompt_tokens: int
    # The tokens that the host knows. This is the engine's own list: read it within the step.
    token_ids: Sequence[int]


class TokenMasks(Protocol):
    """Which tokens a row may draw."""

    def wait(self) -> "Sequence[npt.NDArray[np.uint8] | None]":
        """One mask for each draw of the row: a bit for each token id, lowest first, set if the token may be drawn. None
        in place of a mask if any token may be.

        There are fewer masks than draws if a draft is not allowed in its place, or ends the request: draws after that
        draft are discarded. There may also be more masks than draws. Call this in `draw`, once the row's drafts and all
        tokens before them are known; it may block until the masks are made.
        """
        ...


class Row(msgspec.Struct, frozen=True):
    """One request's part of a step: compute `token_ids` at positions start, start+1, ...

    The KV of positions below `start` is in `block_ids` already, or a batch launched before writes it; the step writes
    the KV of its own tokens there. The last `drafts` tokens are guesses: the row draws a token after the one before
    them and after each guess, and yields its draws up to and including the first that differs from its guess.
    """

    token_ids: Sequence[int]
    start: int
    # The block of each 64 positions, in order; covers at least [0, end). The engine gives its own array("i"), which
    # numpy and torch read as a buffer, and which it changes later: read it within `launch`.
    block_ids: Sequence[int]
    # How to draw; None if the prompt goes on in a later step.
    sampling: Sampling | None
    # If set, `token_ids` is empty: the row computes the last token that row `follows` of the batch launched before
    # yields, and the first `drafts` of that row's guesses. `start` assumes that that row yields all that it can; for
    # each token less, this row begins one position earlier.
    follows: int | None = None
    # Set if `sampling` counts tokens. It may lack the tokens that this row follows, which the host does not know yet.
    history: History | None = None
    drafts: int = 0
    # The KV of this many leading tokens is in the blocks already. It is not written again: others may read those
    # blocks.
    shared: int = 0
    # The prompt's token after the row's last one, if the row draws none.
    next_token: int | None = None
    # Whether the model thinks after the last token that the host knows. Set if drafts of this row, or of the row that
    # follows it, may be accepted relaxedly while the model thinks; None if drafts are accepted strictly.
    thinking: bool | None = None
    # Set if only some tokens may be drawn.
    masks: TokenMasks | None = None
    # If set, the row is part of a prompt, and reports the log probabilities of all its tokens but the first and of
    # `next_token`, each with this many alternatives.
    prompt_logprobs: int | None = None
    # How sparse the attention of its later tokens may be, on a backend that can compute it so; None if it is exact.
    sparse: SparsePrefill | None = None

    @property
    def tokens(self) -> int:
        """How many tokens the row computes."""
        return len(self.token_ids) or 1 + self.drafts

    @property
    def end(self) -> int:
        return self.start + (len(self.token_ids) or 1 + self.drafts)

    @property
    def draws(self) -> int:
        """The most tokens that the row yields."""
        return 0 if self.sampling is None else 1 + self.drafts

    @property
    def decodes(self) -> bool:
        """Whether the row computes one token, and perhaps drafts after it."""
        return self.tokens == 1 + self.drafts


class Batch(msgspec.Struct, frozen=True):
    """Rows of one step, in this order: decode rows (one token and its drafts) by their number of drafts, chunks of one
    token, longer chunks. A batch without rows is a dummy.
    """

    step: int
    rows: Sequence[Row]
    # A backend that knows when the KV of the first n layers of all rows is written calls this with n, from `launch` or
    # `collect`. Once the batch is collected, all layers are written.
    on_layers: Callable[[int], None] | None = None


class Sample(msgspec.Struct, frozen=True):
    """What one row with sampling yields: the tokens after `row.end - row.drafts`, one to `row.draws` of them."""

    token_ids: Sequence[int]
    # One for each token; None if they were not asked for.
    logprobs: Sequence[Logprobs] | None = None
    # Guesses of the tokens that come next.
    drafts: Sequence[int] = ()
    # How many of the tokens are drafts that were accepted although other tokens were drawn.
    relaxed: int = 0


class StepShape(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks of a worker agree on before they launch a step together."""

    # The most tokens that any rank computes; kernels are chosen by it. 0 if no rank has anything to compute. Rows that
    # decode count with all drafts that they may have.
    tokens: int
    # Whether each row of each rank computes one token, one token and its drafts, or so few tokens of a prompt that they
    # are computed as decode rows: see engine.pace.tails.
    decode_only: bool = True
    # Whether the ranks end before this step.
    stopping: bool = False
    # How many tokens are guessed after each drawn token.
    drafts: int = 0
    # The most rows that draw, and so guess, on any rank.
    drawing: int = 0
    # The most prompts that any rank begins: a draft layer computes one more token of each.
    beginning: int = 0
    # On how many ranks at least one prompt waits to begin. For engine.pace.alignment.
    waiting_prompts: int = 0
    # Whether some rank decodes.
    decodes: bool = False
    # Whether some rank computes a prompt that is not done after the step.
    prefills: bool = False
    # The most rows of a decode graph that any rank takes: a prompt's few tokens may take several.
    rows: int = 0
    # Whether prompts of some rank must wait after this step too (engine.pace.mixed_steps). False unless `decode_only`.
    owes: bool = False
    # On how many ranks a prompt is left of which all ranks compute chunks together, and on how many of these it has
    # begun. For engine.pace.turns.
    dividing: int = 0
    begun: int = 0


class SparseMeasure(msgspec.Struct, frozen=True, array_like=True):
    """What sparse attention kept of one chunk, in one layer."""

    # Which share of the exact attention was kept: the mean over the heads and some of the queries.
    recall: float
    # Which share of the blocks that exact attention computes was computed.
    density: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a decode step by its rows and its drafts."""

    # Ascending numbers of rows.
    rows: Sequence[int]
    # For each of these numbers: the seconds with no drafts, with one draft a row, ...
    seconds: Sequence[Sequence[float]]

    def of(self, rows: int) -> Sequence[float]:
        """By depth, at the nearest measured number of rows that is no smaller; at the largest if all are smaller."""
        return self.seconds[min(bisect_left(self.rows, rows), len(self.rows) - 1)]


class Launched(Protocol):
    """A step on its way through a backend."""

    def draw(self) -> None:
        """Draw the tokens of each row with sampling. To be called once, before the next launch.

        If a row has masks, and follows a row of the batch launched before, that batch is collected before this call.
        """
        ...

    def collect(self) -> list[Sample | None]:
        """Wait for the step. One entry per row, None where the row has no sampling."""
        ...

    def prompt_logprobs(self) -> Mapping[int, PromptLogprobs]:
        """What rows with `prompt_logprobs` report, by the row's index. To be called after `collect`."""
        ...


def shape_of(rows: Sequence[Row]) -> StepShape:
    """The shape of a step that this rank computes alone."""
    tokens = [row.tokens for row in rows]
    return StepShape(
        sum(tokens),
        decode_only=all(row.decodes and row.prompt_logprobs is None for row in rows),
        drafts=max((row.drafts for row in rows), default=0),
        drawing=sum(row.sampling is not None for row in rows),
        beginning=sum(row.start == 0 for row in rows),
        prefills=any(row.sampling is None for row in rows),
        rows=len(rows),
    )


def with_known_tokens(rows: Sequence[Row], previous: Sequence[Row], samples: Sequence[Sample | None]) -> Sequence[Row]:
    """The rows with the tokens that they follow filled in, from the batch launched before and its samples."""
    return [row if row.follows is None else _known(row, previous[row.follows], samples[row.follows]) for row in rows]


def _known(row: Row, followed: Row, sample: Sample | None) -> Row:
    assert sample is not None, "a row follows one that draws nothing"
    tokens = [*sample.token_ids[-1:], *sample.drafts[: row.drafts]]
    start = row.start - (followed.draws - len(sample.token_ids))
    return Row(tokens, start, row.block_ids, row.sampling, drafts=len(tokens) - 1)


class Backend(Protocol):
    """What computes a batch. Owns the tensors of the KV pool; the engine owns which block is whose."""

    model: str
    namespace: KvNamespace
    context_tokens: int
    vocabulary_size: int
    total_blocks: int
    # One block of KV, all layers.
    block_bytes: int
    # How many layers of the KV only drafts need.
    draft_layers: int
    # The tokens that tell when the model thinks; None if drafts are accepted strictly.
    think_tokens: ThinkTokens | None
    # How long steps take with each number of drafts; None if the engine is not to choose that number.
    step_times: StepTimes | None
    # How fast steps were before any request came; None if that was not measured.
    speed: WorkerSpeed | None
    eos_token_ids: frozenset[int]
    # Whether the device computes while the host does other things.
    asynchronous: bool
    # The device's name: a card's, "CPU" or "oracle".
    device_name: str

    @property
    def captured_rows(self) -> int:
        """The most decode rows of a step that is captured as a graph; 0 if no step is."""
        ...

    @property
    def captured_prompt_tokens(self) -> int:
        """The most tokens of a step with prompts that is captured, except for attention of prompts; 0 if none is."""
        ...

    @property
    def balance(self) -> BalanceReport | None:
        """How evenly the ranks share the experts' load; None if experts stay where they are."""
        ...

    def drain_sparse_measures(self) -> Sequence[SparseMeasure]:
        """Samples of how much sparse attention kept, from steps since the last call. Does not wait for any step."""
        ...

    def kv_memory(self) -> KvMemory:
        """The KV pool as transfers see it."""
        ...

    def host_slots(self) -> "HostSlots | None":
        """Host memory for blocks that the pool evicts; None if there is to be none, or if it cannot be had.
        To be called once, by the engine.
        """
        ...

    def clear_drafts(self, block_ids: Sequence[int]) -> None:
        """Empty the draft layers of blocks that no step in flight uses. Steps launched later find them empty."""
        ...

    def launch(self, batch: Batch, shape: StepShape) -> Launched:
        """Begin to compute the batch's tokens, after the batch launched before. Rows may follow rows of that batch.

        The step has the agreed shape, which is no smaller than the batch. A batch without rows is a dummy: the rank
        computes padding while other ranks compute rows, and touches no block of a request. At most one batch is not
        collected yet when another is launched; batches are collected in order.
        """
        ...


def execute(backend: Backend, batch: Batch, shape: StepShape | None = None) -> list[Sample | None]:
    """Compute one batch from its launch to its samples, by default in a step of its own shape."""
    launched = backend.launch(batch, shape or shape_of(batch.rows))
    launched.draw()
    return launched.collect()
