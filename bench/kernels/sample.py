"""Sampling from the logits of a decode step, and the reference, which sorts."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.kernels.deepseek_r1 import VOCABULARY
from bench.kernels.timing import Case
from kernels.sample import greedy, reference, triton
from kernels.sample.draws import Draw, Draws, pack_draws

FILTERS = {"top_p 0.95": (0, 0.95), "top_k 50, top_p 0.95": (50, 0.95), "no filter": (0, 1.0)}


def cases() -> Iterator[Case]:
    for rows in (1, 64):
        size = rows * VOCABULARY * 2
        yield Case(f"greedy, {rows} rows", "deepmesh", partial(_greedy, rows, greedy), size)
        yield Case(f"greedy, {rows} rows", "torch", partial(_greedy, rows, reference.greedy), size)
        for name, (top_k, top_p) in FILTERS.items():
            shape = f"{name}, {rows} rows"
            yield Case(shape, "deepmesh", partial(_draw, rows, top_k, top_p, triton.draw), size)
            definition = partial(reference.draw, filtered=bool(top_k) or top_p < 1)
            yield Case(shape, "torch", partial(_draw, rows, top_k, top_p, definition), size)


def _logits(rows: int) -> torch.Tensor:
    return (torch.randn(rows, VOCABULARY, device="cuda") * 3).bfloat16()


def _greedy(rows: int, take: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], object]:
    return partial(take, _logits(rows))


def _draw(
    rows: int, top_k: int, top_p: float, draw: Callable[[torch.Tensor, Draws], torch.Tensor]
) -> Callable[[], object]:
    draws = [Draw(0.6, top_k, top_p, seed=row, position=row) for row in range(rows)]
    return partial(draw, _logits(rows), Draws.unpack(pack_draws(draws, torch.device("cuda"))))
