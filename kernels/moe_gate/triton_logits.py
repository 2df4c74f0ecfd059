"""The gate's linear layer for few tokens in Triton, its long sums shared by many programs."""

import torch
import triton
import triton.language as tl

ROWS, EXPERTS, INPUTS = 32, 32, 128
# Programs that share a tile, so that the chip is full whatever the number of tokens.
SPLITS = 28


# A program adds up a share of the inputs for 32 tokens and 32 experts; the last of a tile's adds up all shares, in
# order, so that the sum does not depend on who came last. Reads 2 bytes a weight for each 32 tokens.
@triton.jit
def _logits(
    hidden, weight, parts, arrivals, out, rows, experts, inputs, hidden_row,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    expert_tiles = tl.cdiv(experts, EXPERTS)
    row = tile // expert_tiles * ROWS + tl.arange(0, ROWS)
    expert = tile % expert_tiles * EXPERTS + tl.arange(0, EXPERTS)
    known, listed = (row < rows)[:, None], (expert < experts)[:, None]
    total = tl.zeros((ROWS, EXPERTS), tl.float32)
    steps = tl.cdiv(inputs, INPUTS)
    for step in range(split * steps // SPLITS, (split + 1) * steps // SPLITS):
        column = step * INPUTS + tl.arange(0, INPUTS)
        inside = (column < inputs)[None, :]
        left = tl.load(hidden + row[:, None] * hidden_row + column[None, :], mask=known & inside, other=0.0)
        right = tl.load(weight + expert[:, None] * inputs + column[None, :], mask=listed & inside, other=0.0)
        total = tl.dot(left, right.T, total, input_precision="ieee")
    place = tl.arange(0, ROWS)[:, None] * EXPERTS + tl.arange(0, EXPERTS)[None, :]
    parts += tile * SPLITS * (ROWS * EXPERTS) + place
    tl.store(parts + split * (ROWS * EXPERTS), total)
    # Every thread's part must be written before one of them reports it.
    tl.debug_barrier()
    if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") != SPLITS - 1:
        return
    total = tl.zeros((ROWS, EXPERTS), tl.float32)
    for part in range(SPLITS):
        total += tl.load(parts + part * (ROWS * EXPERTS), cache_modifier=".cg")
    tl.store(arrivals + tile, 0)
    tl.store(out + row[:, None] * experts + expert[None, :], total, mask=known & (expert < experts)[None, :])


def tiles(rows: int, experts: int) -> int:
    return triton.cdiv(rows, ROWS) * triton.cdiv(experts, EXPERTS)


def gate_logits(hidden: torch.Tensor, weight: torch.Tensor, arrivals: torch.Tensor) -> torch.Tensor:
    """arrivals: int32, zero between calls, one for each of the `tiles`."""
    (rows, inputs), experts = hidden.shape, weight.shape[0]
    out = torch.empty(rows, experts, dtype=torch.float32, device=hidden.device)
    if not rows:
        return out
    count = tiles(rows, experts)
    assert arrivals.shape[0] >= count
    parts = torch.empty(count, SPLITS, ROWS, EXPERTS, dtype=torch.float32, device=hidden.device)
    _logits[(count, SPLITS)](
        hidden, weight, parts, arrivals, out, rows, experts, inputs, hidden.stride(0),
        SPLITS, ROWS, EXPERTS, INPUTS, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
