"""Drawing tokens from logits, and their log probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.sample import reference
from kernels.sample.philox import uniform


@dataclass(frozen=True, slots=True)
class Draw:
    """How to draw one row. temperature > 0; top_k 0 keeps all; position is the drawn token's own."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    position: int


def greedy(logits: torch.Tensor) -> list[int]:
    """The most likely token of each row. logits: [rows, vocabulary]; no rows give none. Backend: the reference."""
    assert logits.dim() == 2
    return reference.greedy(logits)


def draw(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token a row: temperature first, then the `top_k` most likely, then the smallest set that holds `top_p`.

    logits: [rows, vocabulary], any float dtype; one Draw a row, no rows give no tokens. The random number of a row is a
    function of its seed and position alone, so a token does not depend on the batch it is drawn in. Backend: the
    reference.
    """
    assert len(draws) == logits.shape[0]
    return [
        reference.draw(row, item.temperature, item.top_k, item.top_p, uniform(item.seed, item.position))
        for row, item in zip(logits, draws, strict=True)
    ]


def logprobs(logits: torch.Tensor, token_id: int, count: int) -> tuple[float, list[int], list[float]]:
    """Natural log probabilities at temperature 1 of one row.

    logits: [vocabulary]. Returns (of token_id, the `count` most likely token ids, theirs), best first. Backend: the
    reference.
    """
    assert logits.dim() == 1 and 0 <= count <= logits.shape[0]
    return reference.logprobs(logits, token_id, count)
