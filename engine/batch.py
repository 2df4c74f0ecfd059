"""One step's work as plain data: what the batcher decides and a backend executes.

Structs of msgspec because hundreds are made in every step, and frozen dataclasses take ten times as long.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from engine.balance.report import BalanceReport
from engine.sparse_measure import SparseMeasure
from engine.step_times import StepTimes
from engine.thinking import ThinkTokens
from mesh.domain.outputs import Logprobs, PromptLogprobs
from mesh.domain.sampling import Sampling
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.domain.workers import KvNamespace
from transfer.memory import KvMemory


class History(msgspec.Struct, frozen=True):
    """The tokens of a request, for penalties on those that it has."""

    # Names the request.
    key: int
    # How many of its first tokens were given; the others were generated, here or on another worker.
    prompt_tokens: int
    # Those that the host knows: the engine's own list, to be read within the step.
    token_ids: Sequence[int]


class TokenMasks(Protocol):
    """Which tokens a row may draw."""

    def wait(self) -> Sequence[npt.NDArray[np.uint8] | None]:
        """One for each draw of the row. A bit for each token id, the lowest first, set where it may be drawn; None if
        any may be.

        There are fewer if a draft may not be drawn in its place, or ends the request: what is drawn behind it, nobody
        wants. And there may be more than the row has draws. To be asked in `draw`, once all tokens before and the
        row's drafts are known; it may take until the masks are made.
        """
        ...


class Row(msgspec.Struct, frozen=True):
    """One request's part of a step: compute `token_ids` at positions start, start+1, ...

    The KV of positions below `start` is in `block_ids` already, or a batch launched before writes it; the step writes
    the KV of its own tokens there. The last `drafts` tokens are guesses: the row draws a token after the one before
    them and after each guess, and yields those up to the first that its guess does not equal.
    """

    token_ids: Sequence[int]
    start: int
    # The block of each 64 positions, in order; covers at least [0, end). The engine gives its own array("i"), which
    # numpy and torch read as a buffer, and which it changes later: read it within `launch`.
    block_ids: Sequence[int]
    # How to draw; None if the prompt goes on in a later step.
    sampling: Sampling | None
    # If set, `token_ids` is empty: the row computes the last token that this row of the batch launched before yields,
    # and the first `drafts` of its guesses. `start` is then where it begins if that row yields all that it can; for
    # each token less it begins one earlier.
    follows: int | None = None
    # If `sampling` counts tokens. The host may not know the last of them, which the row follows.
    history: History | None = None
    drafts: int = 0
    # The KV of so many of the first tokens is there, perhaps in blocks that others read, and is not written again.
    shared: int = 0
    # The token behind the last, if the row draws none.
    next_token: int | None = None
    # If drafts of the row, or of one that follows it, may be accepted relaxedly while they are thoughts: whether the
    # token behind the last one that the host knows is. None if drafts are accepted strictly.
    thinking: bool | None = None
    # If only some tokens may be drawn.
    masks: TokenMasks | None = None
    # If set, the row is part of a prompt, and reports the log probabilities of its tokens behind the first and of
    # `next_token`, with so many alternatives.
    prompt_logprobs: int | None = None
    # How the attention of its later tokens is computed, by a backend that can; None if exactly.
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
        """Whether the row computes one token, and perhaps drafts behind it."""
        return self.tokens == 1 + self.drafts


class Batch(msgspec.Struct, frozen=True):
    """Rows of one step: those of one token and its drafts first (decode), by their number; then chunks of prompts,
    those of one token before longer ones. Without rows it is a dummy.
    """

    step: int
    rows: Sequence[Row]
    # A backend that knows when the first n layers of all rows have their KV calls this from `launch` or `collect`. When
    # the batch is collected all layers have it.
    on_layers: Callable[[int], None] | None = None


class Sample(msgspec.Struct, frozen=True):
    """What one row with sampling yields: the tokens behind `row.end - row.drafts`, one to `row.draws` of them."""

    token_ids: Sequence[int]
    # One a token, if they were asked for.
    logprobs: Sequence[Logprobs] | None = None
    # Guesses of the tokens that come next.
    drafts: Sequence[int] = ()
    # How many of the tokens were accepted in place of others that were drawn.
    relaxed: int = 0


class StepShape(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks of a worker agree on before they launch a step together."""

    # The most that any rank computes; kernels are chosen by it. 0 if no rank has anything to compute. Rows that decode
    # count with all drafts that they may have.
    tokens: int
    # Each row of each rank computes one token, or one and its drafts, or so few of a prompt that they are computed as
    # rows that decode: see engine.tails.
    decode_only: bool = True
    # The ranks end before this step.
    stopping: bool = False
    # How many tokens are guessed behind each that is drawn.
    drafts: int = 0
    # The most rows of any rank that draw, and thus guess.
    drawing: int = 0
    # The most prompts that any rank begins: a draft layer computes one token more of each.
    beginning: int = 0
    # For engine.alignment. On how many ranks prompts wait to begin, or one does.
    waiting_prompts: int = 0
    # Some rank decodes.
    decodes: bool = False
    # Some rank computes a prompt that is not done after the step.
    prefills: bool = False
    # The most rows of a decode graph that any rank takes: a prompt's few tokens may take several.
    rows: int = 0
    # For engine.mixed_steps. Some rank's prompts wait behind this step too; false if it computes any.
    owes: bool = False


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
        """By row, what those with `prompt_logprobs` report. To be called after `collect`."""
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
    # Layers of the KV that drafts alone need.
    draft_layers: int
    # The tokens that tell when the model thinks; None if drafts are accepted strictly.
    think_tokens: ThinkTokens | None
    # What steps take by the number of drafts; None if that is not to be chosen.
    step_times: StepTimes | None
    eos_token_ids: frozenset[int]
    # Whether the device computes while the host does other things.
    asynchronous: bool
    # What computes: a card's name, "CPU" or "oracle".
    device_name: str

    @property
    def captured_rows(self) -> int:
        """Steps of up to so many rows that decode are captured graphs; 0 if none are."""
        ...

    @property
    def balance(self) -> BalanceReport | None:
        """How evenly the ranks share the experts' load; None if experts stay where they are."""
        ...

    def drain_sparse_measures(self) -> Sequence[SparseMeasure]:
        """Samples of what sparse attention kept, of steps since the last call. Waits for none."""
        ...

    def kv_memory(self) -> KvMemory:
        """The KV pool as transfers see it."""
        ...

    def clear_drafts(self, block_ids: Sequence[int]) -> None:
        """Empty the draft layers of blocks that no step in flight uses, before those that are launched later."""
        ...

    def launch(self, batch: Batch, shape: StepShape) -> Launched:
        """Begin to compute the batch's tokens, after the batch launched before, of which its rows may follow some.

        The step has the agreed shape, which is no smaller than the batch. A batch without rows is a dummy: the rank
        computes padding, as other ranks compute rows, and touches no block of a request. At most one batch that is not
        collected is there when another is launched; they are collected in order.
        """
        ...


def execute(backend: Backend, batch: Batch, shape: StepShape | None = None) -> list[Sample | None]:
    """Compute one batch from its launch to its samples, by default in a step of its own shape."""
    launched = backend.launch(batch, shape or shape_of(batch.rows))
    launched.draw()
    return launched.collect()
