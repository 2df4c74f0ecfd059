"""DeepSeek-R1's head with few rows: our kernel and torch."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.kernels.deepseek_r1 import HIDDEN, VOCABULARY
from bench.kernels.inputs import random_bfloat16
from bench.kernels.timing import Case
from kernels.linear import linear, reference

ROWS = (1, 8, 32, 64, 96)
Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cases() -> Iterator[Case]:
    weight_bytes = 2.0 * VOCABULARY * HIDDEN
    for rows in ROWS:
        for provider, call in (("deepmesh", linear), ("torch", reference.linear)):
            size_bytes, flops = weight_bytes + 2 * rows * (HIDDEN + VOCABULARY), weight_bytes * rows
            yield Case(f"head by {rows}", provider, partial(_product, call, rows), size_bytes, flops)


def _product(call: Linear, rows: int) -> Callable[[], object]:
    weight = random_bfloat16(VOCABULARY, HIDDEN)
    x = random_bfloat16(rows, HIDDEN)
    return lambda: call(x, weight)
