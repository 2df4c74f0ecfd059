"""Attention over one long prompt of DeepSeek-R1, dense and sparse, and the selection of what sparse attention keeps.

The time of sparse attention depends on the share of blocks that is kept, and that share depends on the text. The bench
therefore sets shares: half of each in random columns, half in the nearest distances. The shares of a mesh are in
`deepmesh_engine_sparse_density`.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch

from bench.kernels.deepseek_r1 import HEADS, NOPE, ROPE, VALUE, WIDTH
from bench.kernels.inputs import random_bfloat16
from bench.kernels.timing import Case
from kernels.mla_prefill import mla_prefill, plan_prefill
from kernels.sparse_prefill import BLOCK_KEYS, LAST_QUERIES, Selection, select_lines, sparse_prefill
from kernels.sparse_prefill.line_masses import line_masses
from kernels.sparse_prefill.selection import MASS_UNITS, choose

SCALE = (NOPE + ROPE) ** -0.5
# Tokens of the prompt, and shares of its blocks.
LENGTHS = {32768: (0.2, 0.1, 0.05), 131072: (0.1, 0.05, 0.025)}
RECALL = 0.95


def cases() -> Iterable[Case]:
    for tokens, shares in LENGTHS.items():
        flops = tokens * (tokens + 1.0) * HEADS * (NOPE + ROPE + VALUE)
        size_bytes = 2.0 * tokens * HEADS * 2 * (NOPE + ROPE + VALUE)
        case = partial(Case, f"prompt of {tokens}, {HEADS} heads")
        yield case("deepmesh, dense", partial(_dense, tokens), size_bytes, flops)
        for share in shares:
            provider = f"deepmesh, {share:.1%} of the blocks"
            yield case(provider, partial(_sparse, tokens, share), size_bytes, share * flops)
        key_bytes, products = 2.0 * tokens * WIDTH, 2.0 * LAST_QUERIES * tokens * HEADS * WIDTH
        compressed = partial(_selection, tokens, torch.float8_e4m3fn)
        yield case("deepmesh, selection in e4m3", compressed, key_bytes / 2, products, fp8=True)
        yield case("deepmesh, selection", partial(_selection, tokens, torch.bfloat16), key_bytes, products)
        yield case("torch, selection", partial(_torch_selection, tokens), key_bytes, products)


def selection_of(tokens: int, heads: int, share: float, device: torch.device) -> Selection:
    """Lines that keep about this share of a whole prompt's blocks. Distances are whole blocks, at least two."""
    blocks = -(-tokens // BLOCK_KEYS)
    # The nearest n of a triangle's diagonals are n * (2 - n / blocks) / blocks of it.
    nearest = max(round(blocks * (1 - (1 - share / 2) ** 0.5)), 2)
    columns = torch.rand(heads, blocks, device=device) < share / 2
    columns[:, 0] = True
    slashes = (torch.arange(blocks, device=device) < nearest).expand(heads, -1)
    return Selection(columns, slashes)


def _dense(tokens: int) -> Callable[[], object]:
    inputs, plan = _inputs(tokens), plan_prefill([tokens], [tokens], torch.device("cuda"))
    out = random_bfloat16(tokens, HEADS, VALUE)
    return lambda: mla_prefill(*inputs, plan, out, scale=SCALE)


def _sparse(tokens: int, share: float) -> Callable[[], object]:
    inputs, selected = _inputs(tokens), selection_of(tokens, HEADS, share, torch.device("cuda"))
    results = random_bfloat16(tokens, HEADS, VALUE), torch.empty(HEADS, tokens, device="cuda")
    return lambda: sparse_prefill(*inputs, selected, *results, first_query=0, scale=SCALE)


def _selection(tokens: int, dtype: torch.dtype) -> Callable[[], object]:
    """The selection in the absorbed form, as the engine makes it. dtype: that of the latents."""
    query, key = _absorbed(tokens)
    stored = key.to(dtype)
    return lambda: select_lines(query, stored, scale=SCALE, recall=RECALL)


def _torch_selection(tokens: int) -> Callable[[], object]:
    """The selection by its definition in torch, which keeps scores in memory, a few heads at a time."""
    query, key = _absorbed(tokens)
    first, wanted = tokens - LAST_QUERIES, round(RECALL * LAST_QUERIES * MASS_UNITS)
    return lambda: choose(line_masses(query, key, SCALE), first, wanted)


def _absorbed(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random_bfloat16(LAST_QUERIES, HEADS, WIDTH), random_bfloat16(tokens, 1, WIDTH)


def _inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, both parts of the keys, and values."""
    own, value = random_bfloat16(tokens, HEADS, NOPE + VALUE).split([NOPE, VALUE], dim=2)
    return random_bfloat16(tokens, HEADS, NOPE + ROPE), own, random_bfloat16(tokens, WIDTH)[:, WIDTH - ROPE :], value
