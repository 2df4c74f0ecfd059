"""A prompt's attention in the expanded form, some heads at a time, so that not too many keys are expanded at once.

A head attends to all its keys at once. If keys were divided instead, each part would read the queries and begin every
tile again, and its outputs would have to be merged with those of the parts before.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from engine.model.activations import WrittenRows
from kernels.mla_prefill import PrefillPlan, attend_and_quantize, mla_prefill

# Heads are expanded in multiples of this: fewer do not fill the device, and a weight's blocks of 128 rows stay whole.
HEADS_TOGETHER = 8

ExpandedKeys = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Gives, for some heads, both parts of all their keys, and their values, as `mla_prefill` takes them.
Expand = Callable[[slice], ExpandedKeys]


@dataclass(frozen=True, slots=True)
class ExpandedRows:
    """Tokens [first, stop) of the batch that attend in the expanded form: rows with or without a prefix each."""

    first: int
    stop: int
    plan: PrefillPlan
    # [keys] int64: slots of each row and of the prefix before it; None if no row has a prefix.
    known: torch.Tensor | None
    # How many keys are expanded at once for all heads; of more keys, those of fewer heads.
    expanded: int

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """The part of a batch's tensor that belongs to these tokens; the tensor itself if that is all of it, because
        making a view takes the host time.
        """
        return tokens if self.stop - self.first == tokens.shape[0] else tokens[self.first : self.stop]


def attend(
    row: ExpandedRows,
    query: torch.Tensor,
    expand: Expand,
    out: WrittenRows,
    scale: float,
    mask: torch.Tensor | None = None,
) -> None:
    """query: [queries, heads, nope + rope], rotated; out: [queries, heads * value]; mask: as of `mla_prefill`."""
    queries, heads, _ = query.shape
    width = (out if isinstance(out, torch.Tensor) else out.values).shape[1] // heads
    for some in cut_heads(heads, row.plan.keys, row.expanded):
        # Slicing takes the host time.
        keys, own = expand(some), query if some.stop - some.start == heads else query[:, some]
        if isinstance(out, torch.Tensor):
            values = out.view(queries, heads, width)[:, some]
            mla_prefill(own, *keys, row.plan, values, scale=scale, mask=mask)
        else:
            columns = out.columns(some.start * width, some.stop * width)
            attend_and_quantize(own, *keys, row.plan, columns, scale=scale, mask=mask)
        # Freed before the next keys are expanded.
        del keys


def cut_heads(heads: int, keys: int, expanded: int) -> Iterator[slice]:
    """Divide the heads into about equal parts. The keys of a part's heads are no more than `expanded` keys of all
    heads, unless HEADS_TOGETHER heads, the smallest part, have more: with few heads, or very many keys.
    """
    units = -(-heads // HEADS_TOGETHER)
    parts = -(-units // max(expanded * heads // (keys * HEADS_TOGETHER), 1))
    size = -(-units // parts) * HEADS_TOGETHER
    return (slice(first, min(first + size, heads)) for first in range(0, heads, size))
