"""One step's work as plain data: the rows that the batcher decides and a backend computes, and what they yield.

Structs of msgspec because hundreds are made in every step, and frozen dataclasses take ten times as long.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from mesh.domain.outputs import Logprobs
from mesh.domain.sampling import Sampling
from mesh.domain.sparse_prefill import SparsePrefill

if TYPE_CHECKING:
    # Services import this module too, and they need no numpy.
    import numpy as np
    import numpy.typing as npt


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


def with_known_tokens(rows: Sequence[Row], previous: Sequence[Row], samples: Sequence[Sample | None]) -> Sequence[Row]:
    """The rows with the tokens that they follow filled in, from the batch launched before and its samples."""
    return [row if row.follows is None else _known(row, previous[row.follows], samples[row.follows]) for row in rows]


def _known(row: Row, followed: Row, sample: Sample | None) -> Row:
    assert sample is not None, "a row follows one that draws nothing"
    tokens = [*sample.token_ids[-1:], *sample.drafts[: row.drafts]]
    start = row.start - (followed.draws - len(sample.token_ids))
    return Row(tokens, start, row.block_ids, row.sampling, drafts=len(tokens) - 1)
