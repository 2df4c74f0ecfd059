"""The indexer's queries, in the form of its keys."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class IndexQueries:
    # [tokens, heads, width] contiguous: of the keys' dtype, or e4m3 if they are quantized.
    values: torch.Tensor
    # [tokens, heads] float32: what a head's score counts, with the scale of its query.
    weights: torch.Tensor
