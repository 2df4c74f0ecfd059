"""Whole layers of DeepSeek-R1's INT4 experts on one of four ranks, by how unevenly tokens choose experts.

Steps: tokens of all ranks. Experts are drawn by Zipf's law and then moved so that the load is even, or all are drawn
equally often ("uniform"). Each tiling of `kernels.w4a8_gemm` is timed with the one that is chosen, on the rank whose
experts have the most tiles. Prompts: a chunk of all ranks, whose rows are sorted by expert and padded.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial

import numpy as np
import torch

from bench.kernels.deepseek_r1 import CHOICES, EXPERT_WIDTH, EXPERTS, HIDDEN
from bench.kernels.timing import Case
from bench.kernels.w4a8 import WEIGHT_SIZE, random_int4
from bench.node.skew import zipf
from engine.balance.placement import ExpertPlacement, balancing, first_placement
from kernels.moe_permute import Layout, choose_layout
from kernels.w4a8_gemm import Int4FeedForward, ScaledRows, int4_feed_forward, w4a8_feed_forward
from kernels.w4a8_gemm.tiling import TILINGS, Tiling

RANKS, COPIES = 4, 2
# Tokens of all ranks in a step that decodes, and in one of prompts.
STEPS, CHUNK = (256, 512, 768, 1024), 16384
EXPONENTS = (0.0, 0.5, 1.0)
# Rows of a tile by which ranks are compared.
TILE = 64


def cases() -> Iterator[Case]:
    for tokens in (*STEPS, CHUNK):
        for exponent in EXPONENTS:
            slots, choices = _busiest(tokens, exponent)
            rows = int((choices < slots).sum())
            touched = len(choices[choices < slots].unique())
            load = f"Zipf {exponent:g}" if exponent else "uniform"
            tilings: list[Tiling | None] = [None] if tokens == CHUNK else [None, *TILINGS]
            for tiling in tilings:
                weights = 3 * HIDDEN * EXPERT_WIDTH
                yield Case(
                    shape=f"{slots} INT4 experts' whole layers, {tokens:,} tokens of {RANKS} ranks, {load}",
                    provider="chosen" if tiling is None else f"tiles of {tiling.rows}",
                    make=partial(_layer, slots, choices, tiling),
                    size_bytes=touched * weights * WEIGHT_SIZE + rows * 3 * HIDDEN,
                    flops=2 * rows * weights,
                    fp8=True,
                )


@cache
def _busiest(tokens: int, exponent: float) -> tuple[int, torch.Tensor]:
    """How many slots a rank has, and each token's slots among those of all ranks, the busiest rank's slots first."""
    drawn = np.random.default_rng(tokens)
    log_popularity = zipf(EXPERTS, exponent).log().double().numpy()
    experts = (drawn.gumbel(size=(tokens, EXPERTS)) + log_popularity).argsort(1)[:, -CHOICES:]
    placement = first_placement(EXPERTS, RANKS, COPIES if exponent else 0)
    if exponent:
        *_, found = balancing(placement, np.bincount(experts.ravel(), minlength=EXPERTS).astype(np.float64))
        assert found is not None
        placement = found
    slots = _slots(placement, experts)
    counts = np.bincount(slots.ravel(), minlength=len(placement.experts)).reshape(RANKS, -1)
    busiest = int((-(-counts // TILE)).sum(1).argmax())
    turned = (slots - busiest * placement.slots) % len(placement.experts)
    return placement.slots, torch.from_numpy(turned)


def _slots(placement: ExpertPlacement, experts: np.ndarray) -> np.ndarray:
    """The slot of each choice. Copies of an expert take turns."""
    held = np.array(placement.experts)
    slots = np.empty_like(experts)
    for expert in range(EXPERTS):
        (copies,) = (held == expert).nonzero()
        chosen = experts == expert
        slots[chosen] = copies[np.arange(chosen.sum()) % len(copies)]
    return slots


def _layer(slots: int, choices: torch.Tensor, tiling: Tiling | None) -> Callable[[], object]:
    experts = _experts(slots)
    layout: Layout = choose_layout(choices.cuda(), slots, elsewhere=RANKS * slots - slots)
    values = torch.randn(*layout.shape, HIDDEN, device="cuda").to(torch.float8_e4m3fn)
    x = ScaledRows(values, experts.input_scales, static=True)
    if tiling is None:
        return lambda: w4a8_feed_forward(x, experts, layout)
    # Imported here, because it imports packages that a machine without a GPU lacks.
    from kernels.w4a8_gemm import warpgroups

    return lambda: warpgroups.w4a8_feed_forward(x, experts, layout, tiling)


@cache
def _experts(slots: int) -> Int4FeedForward:
    """Random experts, more than ten times the size of the second-level cache, so that calls need not rotate copies."""
    scales = torch.full((slots,), 0.01, device="cuda")
    gate_up, down = (random_int4(*shape, slots) for shape in ((2 * EXPERT_WIDTH, HIDDEN), (HIDDEN, EXPERT_WIDTH)))
    return int4_feed_forward(gate_up, down, scales, None)
