"""A part of a prompt of V3.2's or GLM-5's: attention to selected tokens, in latents or in expanded keys with a mask."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from bench.kernels.deepseek_r1 import HEADS, LATENT, NOPE, ROPE, VALUE, WIDTH
from bench.kernels.inputs import random_bfloat16
from bench.kernels.selection import SCALE, TOP_K, attend
from bench.kernels.timing import Case
from kernels.mla_prefill import empty_mask, mla_prefill, plan_prefill, write_mask
from kernels.mla_selected import gathered
from kernels.top_tokens import top_tokens


@dataclass(frozen=True)
class Heads:
    model: str
    count: int
    # Widths of a head's own part of the keys and of its values.
    nope: int
    value: int


DEEPSEEK, GLM = Heads("V3.2", HEADS, NOPE, VALUE), Heads("GLM-5", 64, 192, 256)
# Queries, and their context with them.
SHAPES = ((DEEPSEEK, 1452, 3500), (DEEPSEEK, 3500, 7000), (GLM, 1452, 3500), (GLM, 2304, 4352))


def cases() -> Iterable[Case]:
    for heads, queries, context in SHAPES:
        shape = f"{heads.model}, {queries} of {context}, {TOP_K} selected"
        pairs, width = queries * (2 * context - queries + 1) / 2, heads.nope + ROPE + heads.value
        # Queries and outputs alone.
        size_bytes, dense = 2.0 * queries * heads.count * width, 2 * pairs * heads.count * width
        latents = partial(attend, gathered, torch.bfloat16, 1, context, queries, heads.count)
        yield Case(shape, "latents", latents, size_bytes, 2.0 * queries * TOP_K * heads.count * (WIDTH + LATENT))
        yield Case(shape, "mask", partial(_attend, heads, queries, context, masked=True), size_bytes, dense)
        yield Case(shape, "all keys", partial(_attend, heads, queries, context, masked=False), size_bytes, dense)
        yield Case(f"mask of {shape}", "deepmesh", partial(_write, queries, context), 4.0 * queries * TOP_K)


def _attend(heads: Heads, queries: int, context: int, *, masked: bool) -> Callable[[], object]:
    """Keys and values are expanded before."""
    plan, mask = plan_prefill([queries], [context], torch.device("cuda")), None
    own, value = random_bfloat16(context, heads.count, heads.nope + heads.value).split([heads.nope, heads.value], dim=2)
    query, shared = (
        random_bfloat16(queries, heads.count, heads.nope + ROPE),
        random_bfloat16(context, WIDTH)[:, LATENT:],
    )
    out = random_bfloat16(queries, heads.count, heads.value)
    if masked:
        mask = empty_mask(queries, context, out.device)
        write_mask(_choose(queries, context), mask[:, :queries])
    return lambda: mla_prefill(query, own, shared, value, plan, out, scale=SCALE, mask=mask)


def _write(queries: int, context: int) -> Callable[[], object]:
    tokens, mask = _choose(queries, context), empty_mask(queries, context, torch.device("cuda"))
    return lambda: write_mask(tokens, mask[:, :queries])


def _choose(queries: int, context: int) -> torch.Tensor:
    seen = torch.arange(context - queries + 1, context + 1, dtype=torch.int32, device="cuda")
    return top_tokens(torch.randn(queries, context, device="cuda"), seen, TOP_K)
