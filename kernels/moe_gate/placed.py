"""Residual addition, norm and the gate of few tokens on Hopper, with the rows of experts: `cuda/placed.cu`."""

from pathlib import Path

import torch

from kernels.few_rows import MOST_ROWS
from kernels.hopper import is_hopper
from kernels.moe_gate.listed import Listed
from kernels.moe_gate.reference import Routing
from kernels.moe_permute.layout import PLAN_WIDTH, ListedRows
from kernels.nvrtc import encode_rows, load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "placed.cu"
Arguments = structure(SOURCE, "Arguments")
# Numbers of tokens and of experts that kernels are compiled for.
ROWS, EXPERTS = (16, 32), (64, 128)
# As in the source: CTAs; elements and bytes of a unit's rows, and the most units of a CTA; values of a thread; the most
# places of a token.
CTAS, ELEMENTS, LINE, UNITS, VALUES = 8, 64, 128, 4, 8
MOST_CHOICES, MOST_SHARED = 8, 8


def takes(delta: torch.Tensor, weight: torch.Tensor, routing: Routing) -> bool:
    """Whether there are few tokens, and experts without groups, and rows can be read 16 bytes at a time."""
    (tokens, width), experts = delta.shape, weight.shape[0]
    if not MOST_ROWS < tokens <= max(ROWS) or not is_hopper():
        return False
    fits = experts in EXPERTS and width % ELEMENTS == 0 and width <= CTAS * UNITS * ELEMENTS
    chosen = routing.groups == 1 and routing.experts_per_token <= MOST_CHOICES and routing.shared <= MOST_SHARED
    aligned = delta.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    rows = delta.stride(1) == 1 and delta.stride(0) % VALUES == 0
    return fits and chosen and aligned and rows and delta.dtype == weight.dtype == torch.bfloat16


def choose(
    delta: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    epsilon: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
    routing: Routing,
    counted: torch.Tensor | None,
) -> Listed:
    """As `kernels.moe_gate.add_rms_norm_and_choose`, of what it `takes`."""
    (tokens, width), experts, device = delta.shape, weight.shape[0], delta.device
    weights = torch.empty(tokens, routing.places, dtype=torch.float32, device=device)
    chosen, positions = torch.empty(2, tokens, routing.places, dtype=torch.int64, device=device).unbind()
    plan = torch.empty(experts + routing.shared, PLAN_WIDTH, dtype=torch.int32, device=device)
    plain = torch.empty_like(residual)
    rows = next(rows for rows in ROWS if rows >= tokens)
    arguments = Arguments(
        weight=encode_rows(weight.data_ptr(), experts, 2 * width, experts, LINE), delta=delta.data_ptr(),
        factors=norm.data_ptr(), residual=residual.data_ptr(), plain=plain.data_ptr(), bias=bias.data_ptr(),
        counted=None if counted is None else counted.data_ptr(), weights=weights.data_ptr(), experts=chosen.data_ptr(),
        positions=positions.data_ptr(), plan=plan.data_ptr(), tokens=tokens, units=width // ELEMENTS,
        delta_stride=delta.stride(0) // VALUES, bias_stride=bias.stride(0) if bias.dim() == 2 else 0,
        choices=routing.experts_per_token, shared=routing.shared, normalize=routing.normalize, softmax=routing.softmax,
        epsilon=epsilon, scaling=routing.scaling,
    )  # fmt: skip
    kernel = load_kernel(SOURCE, f"gate_{rows}_{experts}", device.index or 0)
    kernel.launch((CTAS, 1, 1), experts // 64 * 128, arguments, cluster=CTAS, dependent=True)
    return Listed(plain, weights, chosen, ListedRows(positions, plan))
