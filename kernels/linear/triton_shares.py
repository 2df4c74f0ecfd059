"""Products of few tokens, with few outputs, whose long sums programs share."""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.tile_sizes import cdiv, next_power_of_2

# A program's outputs and inputs, and its rows: fewer up to MANY_ROWS, so that enough programs share the work.
OUTPUTS, INPUTS = 64, 512
ROWS, FEW_ROWS, MANY_ROWS = 64, 32, 64


# A program multiplies some tokens by 64 outputs over 512 inputs and stores its share of the sums; the kernel that reads
# the results adds the shares. Reads 2 bytes a weight, before it waits, and 2 a value; writes 4 for 512 products. The
# latency of its only load limits it.
@triton.jit(do_not_specialize=["rows"])
def _multiply(
    hidden, weight, out, rows, outputs, inputs, hidden_row,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(0)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = (tl.program_id(2) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    start_next(DEPENDENT)
    column = (share * INPUTS + tl.arange(0, INPUTS))[None, :]
    listed, known = (output < outputs)[:, None], (row < rows)[:, None]
    right = tl.load(weight + output[:, None] * inputs + column, mask=listed & (column < inputs), other=0.0)
    wait_for_earlier(DEPENDENT)
    left = tl.load(hidden + row[:, None] * hidden_row + column, mask=known & (column < inputs), other=0.0)
    product = tl.dot(left, right.T, input_precision="ieee")
    out += (share * rows + row[:, None]) * outputs
    tl.store(out + output[None, :], product, mask=known & (output < outputs)[None, :])


def multiply_in_shares(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `kernels.linear.multiply_in_shares`, of bf16."""
    (rows, inputs), outputs = hidden.shape, weight.shape[0]
    shares = cdiv(inputs, INPUTS)
    tile = min(max(next_power_of_2(rows), 16), ROWS if rows > MANY_ROWS else FEW_ROWS)
    out = torch.empty(shares, rows, outputs, dtype=torch.float32, device=hidden.device)
    if rows:
        launch(_multiply, (shares, cdiv(outputs, OUTPUTS), cdiv(rows, tile)), hidden.device,
            hidden, weight, out, rows, outputs, inputs, hidden.stride(0), tile, OUTPUTS, INPUTS, num_warps=8,
        )  # fmt: skip
    return out
