"""Both products of one token's experts on Hopper, in one kernel: `cuda/one_token.cu`."""

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
# The CUDA source has the same constants; THREADS by form.
THREADS, MOST_INPUTS, MOST_CHOICES, COUNTER_STRIDE = {"bf16": 384, "fp8": 512}, 2048, 32, 8
# None yet: it was never run on a GPU.
MOST_TOKENS = 0
# Values that a lane has at a time.
MULTIPLE = 16
# Units of shared experts that a warp copies before the kernel before has ended, 2 at most.
AHEAD = 2


def takes(x: Activations, choices: torch.Tensor, gate_up: Weight) -> bool:
    """Whether there is one token, of a width that a warp holds, with experts no wider; all bfloat16, or all FP8."""
    rows, weights = _values(x), _values(gate_up)
    _, matrix, hidden = weights.shape
    width = matrix // 2
    fits = max(hidden, width) <= MOST_INPUTS and hidden % MULTIPLE == width % MULTIPLE == 0
    one = rows.shape[0] == 1 <= MOST_TOKENS and choices.numel() <= MOST_CHOICES and rows.is_contiguous()
    return is_hopper(rows.device) and rows.dtype == weights.dtype != torch.float32 and one and fits


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
    (experts, hidden, width), places, device = _values(down).shape, choices.shape[1], choices.device
    assert len(progress) > MOST_CHOICES * COUNTER_STRIDE
    out = torch.empty(places, hidden, dtype=torch.bfloat16, device=device)
    inner = torch.empty(places, width, dtype=torch.bfloat16, device=device)
    positions = torch.empty_like(choices)
    arguments = Arguments(
        gate_up=_values(gate_up).data_ptr(), down=_values(down).data_ptr(), x=_values(x).data_ptr(),
        chosen=choices.data_ptr(), positions=positions.data_ptr(), inner=inner.data_ptr(), out=out.data_ptr(),
        progress=progress.data_ptr(), experts=experts, first=first, shared=shared, choices=places, hidden=hidden,
        width=width, ahead=AHEAD,
    )  # fmt: skip
    form = "bf16"
    if isinstance(x, Quantized):
        assert isinstance(gate_up, BlockScaled) and isinstance(down, BlockScaled)
        form = "fp8"
        arguments.gate_up_scales, arguments.down_scales = gate_up.scales.data_ptr(), down.scales.data_ptr()
        arguments.x_scales, arguments.x_scale_stride = x.scales.data_ptr(), x.scales.stride(1)
    kernel = load_kernel(SOURCE, f"one_token_{form}", device.index or 0)
    kernel.launch((ctas or processors(device), 1, 1), THREADS[form], arguments, dependent=True)
    return out, positions


def _values(x: Activations | Weight) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else x.values
