"""From a step's rows to the micro-batches that it is computed in: one, or two that take turns.

Each rank cuts its own rows. The sizes to which it pads the halves follow from what all ranks have agreed on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec
import torch

from engine.batch import Row
from engine.model.context import ForwardContext
from engine.model.model import Model, OnLayers
from engine.runner import step_parts
from engine.runner.prompt_graphs import PromptGraphs
from engine.runner.spreading import Spread, Spreading
from engine.step.shape import StepShape
from engine.step.two_batch import TwoBatch

# Halves may differ by this share of the step's tokens if no prompt has to be cut then: tokens after a cut have to read
# the keys before it from the pool, and to expand them once more.
UNEVEN = 1 / 8


class MicroBatch(NamedTuple):
    rows: Sequence[Row]
    # The number of tokens to which it is padded, equal on all ranks.
    size: int
    # Set if the ranks compute a chunk of a prompt together.
    spread: Spread | None = None

    def context(self, context: ForwardContext) -> ForwardContext:
        """The context of its rows, and the latents that ranks share if they compute a chunk together."""
        return context if self.spread is None else replace(context, shared_latents=self.spread.latents)


@dataclass(frozen=True, slots=True)
class MicroBatches:
    two_batch: TwoBatch
    # From a batch's number of tokens to the number that it is padded to.
    size: Callable[[int], int]
    # None if each rank computes its own prompts.
    spreading: Spreading | None = None
    # None if prompts are launched kernel by kernel.
    graphs: PromptGraphs | None = None

    def of(self, rows: Sequence[Row], shape: StepShape) -> list[MicroBatch]:
        """The step's rows as micro-batches, in order; a prompt's row may be cut in two, or divided over the ranks. All
        ranks call this for each step.
        """
        spread = None if self.spreading is None else self.spreading.divide(rows, shape)
        if spread is not None:
            return [MicroBatch(spread.rows, self.size(spread.tokens), spread)]
        if self.two_batch.wanted(shape.tokens, decode_only=shape.decode_only):
            return halves(rows, shape, self.size)
        return [MicroBatch(rows, self.size(shape.tokens))]

    @property
    def uncaptured(self) -> "MicroBatches":
        return replace(self, graphs=None)

    def captured(self, contexts: Sequence[ForwardContext]) -> PromptGraphs | None:
        """The graphs that compute the hidden states of such a step's parts; None if no graphs do."""
        return self.graphs if self.graphs is not None and self.graphs.fit(contexts) else None

    def hidden_states(
        self,
        model: Model,
        batches: Sequence[MicroBatch],
        contexts: Sequence[ForwardContext],
        on_layers: OnLayers | None,
    ) -> torch.Tensor:
        """States of the step's own tokens in their order, and perhaps others after them: [tokens or more, hidden]; to
        be read before the next step.
        """
        graphs = self.captured(contexts)
        if graphs is None:
            hidden = step_parts.hidden_states(model, contexts, on_layers)
        else:
            hidden = graphs.hidden_states(contexts[0], on_layers)
        spread = batches[0].spread
        return hidden if spread is None else spread.gathered(hidden, model.expert_group)


def halves(rows: Sequence[Row], shape: StepShape, size: Callable[[int], int]) -> list[MicroBatch]:
    """Two micro-batches of about as many tokens, made of whole rows if these can be divided about evenly."""
    # Rows that decode stay whole, so the second half may have up to `drafts` tokens more than its share.
    sizes = size(-(-shape.tokens // 2)), size(shape.tokens // 2 + shape.drafts)
    bounds = list(accumulate((row.tokens for row in rows), initial=0))
    place = _place(rows, bounds, *sizes)
    first, second = [], []
    for row, (start, end) in zip(rows, pairwise(bounds), strict=True):
        if end <= place:
            first.append(row)
        elif start >= place:
            second.append(row)
        else:
            head, tail = _cut(row, place - start)
            first.append(head)
            second.append(tail)
    return [MicroBatch(first, sizes[0]), MicroBatch(second, sizes[1])]


def _place(rows: Sequence[Row], bounds: Sequence[int], first_size: int, second_size: int) -> int:
    """How many tokens the first half gets."""
    total = bounds[-1]
    middle = -(-total // 2)
    after = next(index for index, bound in enumerate(bounds) if bound >= middle)
    if rows and bounds[after] != middle and rows[after - 1].decodes:
        return bounds[after - 1]
    nearest = min(bounds, key=lambda bound: abs(bound - middle))
    fits = total - second_size <= nearest <= first_size
    return nearest if fits and abs(nearest - middle) <= total * UNEVEN / 2 else middle


def _cut(row: Row, tokens: int) -> tuple[Row, Row]:
    """A prompt's row as its first `tokens` tokens and the rest."""
    head = msgspec.structs.replace(row, token_ids=row.token_ids[:tokens], sampling=None, shared=min(row.shared, tokens))
    tail = msgspec.structs.replace(
        row, token_ids=row.token_ids[tokens:], start=row.start + tokens, shared=max(row.shared - tokens, 0)
    )
    return head, tail
