"""One step's work as plain data: what the batcher decides and a backend executes.

Structs of msgspec because hundreds are made in every step, and frozen dataclasses take ten times as long.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from mesh.domain.outputs import Logprobs
from mesh.domain.sampling import Sampling
from mesh.domain.workers import KvNamespace
from transfer.memory import KvMemory


class Row(msgspec.Struct, frozen=True):
    """One request's part of a step: compute `token_ids` at positions start, start+1, ...

    KV of positions below `start` lies in `block_ids` already, or is written by a batch launched before; the step writes
    KV of its own tokens there.
    """

    token_ids: Sequence[int]
    start: int
    # Covers at least positions [0, start + len(token_ids)), 64 a block, in order. From the engine an array("i"), which
    # numpy and torch read as a buffer; the engine's own list, to be read within the step.
    block_ids: Sequence[int]
    # Draw a token after the last one; None where the prompt goes on in a later step.
    sampling: Sampling | None
    # The row's one token is what this row of the batch launched before draws; `token_ids` is empty then.
    follows: int | None = None

    @property
    def tokens(self) -> int:
        """How many tokens the row computes."""
        return len(self.token_ids) or 1

    @property
    def end(self) -> int:
        return self.start + (len(self.token_ids) or 1)


class Batch(msgspec.Struct, frozen=True):
    """Rows of one step: those of one token first (decode), then chunks of prompts."""

    step: int
    rows: Sequence[Row]
    # Called where the backend can tell, by `launch` or `collect`: the KV of all rows is written in the first n layers.
    # In all of them it is written when the batch is collected.
    on_layers: Callable[[int], None] | None = None


class Sample(msgspec.Struct, frozen=True):
    """The token drawn at position `row.end`, for one row with sampling."""

    token_id: int
    logprobs: Logprobs | None = None


class Launched(Protocol):
    """A batch under way."""

    def collect(self) -> list[Sample | None]:
        """Wait for it. One entry per row, None where the row has no sampling."""
        ...


class Computed:
    """A Launched batch of a backend that computes as it launches."""

    def __init__(self, samples: list[Sample | None]) -> None:
        self._samples = samples

    def collect(self) -> list[Sample | None]:
        return self._samples


def with_known_tokens(rows: Sequence[Row], previous: Sequence[Sample | None]) -> list[Row]:
    """The rows with the tokens that they follow filled in, from the samples of the batch launched before."""
    return [row if row.follows is None else _known(row, previous[row.follows]) for row in rows]


def _known(row: Row, sample: Sample | None) -> Row:
    assert sample is not None, "a row follows one that draws nothing"
    return Row([sample.token_id], row.start, row.block_ids, row.sampling)


class Backend(Protocol):
    """What computes a batch. Owns the tensors of the KV pool; the engine owns which block is whose."""

    model: str
    namespace: KvNamespace
    context_tokens: int
    vocabulary_size: int
    total_blocks: int
    # One block of KV, all layers.
    block_bytes: int
    eos_token_ids: frozenset[int]
    # Whether the device computes while the host does other things.
    asynchronous: bool

    def kv_memory(self) -> KvMemory:
        """The KV pool as transfers see it."""
        ...

    def launch(self, batch: Batch) -> Launched:
        """Begin to compute it, after the batch launched before, of which its rows may follow some.

        At most one batch that is not collected is there when another is launched; they are collected in order.
        """
        ...
