"""Rows whose queries attend to the tokens that indexers select."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from engine.model.indexer_config import MOST_SCORES
from kernels.mla_decode import DecodePlan


@dataclass(slots=True)
class Choice:
    """What the last layer with an indexer of its own has selected; None before the first. Layers write and read it."""

    # [queries, top_k] int32, from `top_tokens`.
    tokens: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class IndexedRows:
    """Tokens [first, stop) of the batch: rows of equal length, one after another."""

    first: int
    stop: int
    plan: DecodePlan
    # [queries] int32: how many tokens each query sees, itself included.
    seen: torch.Tensor
    choice: Choice = field(default_factory=Choice)


def indexed_rows(first: int, stop: int, plan: DecodePlan) -> IndexedRows:
    own = torch.arange(1 - plan.query_tokens, 1, dtype=torch.int32, device=plan.lengths.device)
    return IndexedRows(first, stop, plan, (plan.lengths.unsqueeze(1) + own).flatten())


def cut_queries(first: int, stop: int, context: int) -> Iterator[tuple[int, int]]:
    """Cut a prompt's tokens [first, stop) into parts whose scores are no more than MOST_SCORES. context: of the last
    token.
    """
    most = max(MOST_SCORES // context, 1)
    return ((start, min(start + most, stop)) for start in range(first, stop, most))
