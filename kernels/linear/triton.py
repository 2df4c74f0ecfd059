"""A linear layer for few rows in Triton. Its time is that of reading the weight."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.dependent_launch import dependent_launch, start_next, wait_for_earlier
from kernels.hopper import is_hopper
from kernels.tile_sizes import cdiv, next_power_of_2

# A program's tile, loads in flight and warps.
OUTPUTS, INPUTS, STAGES, WARPS = 128, 128, 4, 4
FEWEST_ROWS, MOST_ROWS = 16, 64
# With fewer outputs there are too few programs for each multiprocessor, and they do not read evenly.
FEWEST_OUTPUTS = 65536


# A program multiplies 128 outputs by all rows; the tensor cores' 64 rows hold outputs. Reads each weight once, 2 bytes,
# and each value of the rows from the second-level cache, 2 bytes. Boxes of both are copied four steps ahead.
@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x, weight, out, rows, outputs, inputs, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    first = tl.program_id(0) * OUTPUTS
    wait_for_earlier(DEPENDENT)
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for column in range(0, inputs, INPUTS):
        total = tl.dot(weight.load([first, column]), x.load([0, column]).T, total)
    row = tl.arange(0, ROWS).to(tl.int64)[:, None]
    output = first + tl.arange(0, OUTPUTS)[None, :]
    tl.store(out + row * outputs + output, total.T.to(out.dtype.element_ty), mask=(row < rows) & (output < outputs))


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    few, large = x.shape[0] <= MOST_ROWS, weight.shape[0] >= FEWEST_OUTPUTS
    # The copy engine requires this.
    aligned = x.shape[1] % 8 == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    return is_hopper() and x.dtype == torch.bfloat16 and x.is_contiguous() and few and large and aligned


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Same as `kernels.linear.linear`, for what it `takes`."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = x.new_empty(rows, outputs)
    if rows:
        held = max(next_power_of_2(rows), FEWEST_ROWS)
        # The copy engine reads zeros beyond a matrix.
        boxes = (TensorDescriptor.from_tensor(each, [size, INPUTS]) for each, size in ((x, held), (weight, OUTPUTS)))
        _few_rows[(cdiv(outputs, OUTPUTS),)](
            *boxes, out, rows, outputs, inputs, held, OUTPUTS, INPUTS, num_stages=STAGES, num_warps=WARPS,
            **dependent_launch(x.device),
        )  # fmt: skip
    return out
