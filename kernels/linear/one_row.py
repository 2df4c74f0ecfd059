"""Linear layers of one row with long inputs on Hopper: `cuda/one_row.cu`."""

from pathlib import Path

import torch

from kernels.hopper import is_hopper, processors
from kernels.nvrtc import load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "one_row.cu"
Arguments = structure(SOURCE, "Arguments")
# As in the source: outputs and threads of a CTA, CTAs of a multiprocessor; and kernels by inputs.
OUTPUTS, THREADS, CTAS = 8, 256, 2
KERNELS = {5120: "multiply_row_5"}


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether there is one row of a supported length, and all CTAs run at once. weight: [outputs, inputs]."""
    if len(x) != 1 or x.shape[1] not in KERNELS or not is_hopper():
        return False
    whole = weight.shape[0] % OUTPUTS == 0 and weight.shape[0] <= OUTPUTS * CTAS * processors(x.device)
    aligned = x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    return x.dtype == weight.dtype == torch.bfloat16 and whole and aligned and x.stride(1) == 1


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `kernels.linear.linear`, of what it `takes`."""
    outputs, inputs = weight.shape
    out = x.new_empty(1, outputs)
    arguments = Arguments(x=x.data_ptr(), weight=weight.data_ptr(), out=out.data_ptr())
    kernel = load_kernel(SOURCE, KERNELS[inputs], x.device.index or 0)
    kernel.launch((outputs // OUTPUTS, 1, 1), THREADS, arguments, dependent=True)
    return out
