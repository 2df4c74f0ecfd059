"""Both products of one token's experts in bfloat16 on Hopper, in one kernel: `cuda/one_token.cu`."""

from pathlib import Path

import torch

from kernels.act_quant.quantized import Quantized
from kernels.fp8_gemm.operands import BlockScaled
from kernels.hopper import is_hopper, processors
from kernels.nvrtc import load_kernel
from kernels.structures import structure

Activations = torch.Tensor | Quantized
Weight = torch.Tensor | BlockScaled
SOURCE = Path(__file__).parent / "cuda" / "one_token.cu"
Arguments = structure(SOURCE, "Arguments")
# The CUDA source has the same constants.
THREADS, MOST_INPUTS, MOST_CHOICES, COUNTER_STRIDE = 384, 2048, 32, 8
VALUES = 8
# None yet: it was never run on a GPU.
MOST_TOKENS = 0


def takes(x: Activations, choices: torch.Tensor, gate_up: Weight) -> bool:
    """Whether there is one token in bfloat16, of a width that a warp holds, with experts no wider."""
    if not isinstance(x, torch.Tensor) or not isinstance(gate_up, torch.Tensor):
        return False
    _, matrix, hidden = gate_up.shape
    width = matrix // 2
    fits = max(hidden, width) <= MOST_INPUTS and hidden % VALUES == width % VALUES == 0
    one = x.shape[0] == 1 <= MOST_TOKENS and choices.numel() <= MOST_CHOICES and x.is_contiguous()
    return is_hopper(x.device) and x.dtype == gate_up.dtype == torch.bfloat16 and one and fits


def feed_forward(
    x: Activations,
    choices: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    progress: torch.Tensor,
    first: int,
    shared: int,
    ctas: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.grouped_gemm.chosen_feed_forward`, for what it `takes`.

    ctas: all of them run at once; by default one for each multiprocessor.
    """
    assert isinstance(x, torch.Tensor) and isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
    (experts, hidden, width), places, device = down.shape, choices.shape[1], x.device
    assert len(progress) > MOST_CHOICES * COUNTER_STRIDE
    out = torch.empty(places, hidden, dtype=torch.bfloat16, device=device)
    inner = torch.empty(places, width, dtype=torch.bfloat16, device=device)
    positions = torch.empty_like(choices)
    arguments = Arguments(
        gate_up=gate_up.data_ptr(), down=down.data_ptr(), x=x.data_ptr(), chosen=choices.data_ptr(),
        positions=positions.data_ptr(), inner=inner.data_ptr(), out=out.data_ptr(), progress=progress.data_ptr(),
        experts=experts, first=first, shared=shared, choices=places, hidden=hidden, width=width,
    )  # fmt: skip
    kernel = load_kernel(SOURCE, "one_token", device.index or 0)
    kernel.launch((ctas or processors(device), 1, 1), THREADS, arguments, dependent=True)
    return out, positions
