"""One step's work as plain data: what the batcher decides and a backend executes.

Structs of msgspec because hundreds are made in every step, and frozen dataclasses take ten times as long.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.messages import Logprobs, Sampling
from transfer.ticket import KvNamespace


class Row(msgspec.Struct, frozen=True):
    """One request's part of a step: compute `token_ids` at positions start, start+1, ...

    KV of positions below `start` lies in `block_ids` already; the step writes KV of its own tokens there.
    """

    token_ids: Sequence[int]
    start: int
    # Covers at least positions [0, start + len(token_ids)), 64 a block, in order. From the engine an array("i"), which
    # numpy and torch read as a buffer; the engine's own list, to be read within the step.
    block_ids: Sequence[int]
    # Draw a token after the last one; None where the prompt goes on in a later step.
    sampling: Sampling | None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class Batch(msgspec.Struct, frozen=True):
    """Rows of one step: those of one token first (decode), then chunks of prompts."""

    step: int
    rows: Sequence[Row]


class Sample(msgspec.Struct, frozen=True):
    """The token drawn at position `row.end`, for one row with sampling."""

    token_id: int
    logprobs: Logprobs | None = None


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

    def execute(self, batch: Batch) -> list[Sample | None]:
        """One entry per row, None where the row has no sampling."""
        ...
