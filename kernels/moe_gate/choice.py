"""The choice of 8 among 256 experts in 8 groups, as DeepSeek-V3 and R1 have them, on Hopper: `cuda/choice.cu`."""

from pathlib import Path

import torch

from kernels.hopper import is_hopper
from kernels.moe_gate.reference import Routing
from kernels.nvrtc import load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "choice.cu"
Arguments = structure(SOURCE, "Arguments")
# What the source supports. With more tokens one warp a token is faster.
EXPERTS, GROUPS, CHOICES, MOST_TOKENS = 256, 8, 8, 256
# The most shares that a CTA adds up, and the most places of a token.
MOST_SHARES, MOST_PLACES = 16, 32


def takes(logits: torch.Tensor, routing: Routing) -> bool:
    """Whether the source supports this. logits: [shares, tokens, experts]."""
    shares, tokens, experts = logits.shape
    made_for = (experts, routing.groups, routing.experts_per_token) == (EXPERTS, GROUPS, CHOICES)
    few = shares <= MOST_SHARES and tokens <= MOST_TOKENS and routing.places <= MOST_PLACES
    return is_hopper() and made_for and few and not routing.softmax


def moe_gate(
    logits: torch.Tensor, bias: torch.Tensor, routing: Routing, counted: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits: [shares, tokens, experts], which it `takes`."""
    assert takes(logits, routing)
    (shares, tokens, _), device = logits.shape, logits.device
    weights = torch.empty(tokens, routing.places, dtype=torch.float32, device=device)
    experts = torch.empty(tokens, routing.places, dtype=torch.int64, device=device)
    if not tokens:
        return weights, experts
    arguments = Arguments(
        logits=logits.data_ptr(), bias=bias.data_ptr(), counted=None if counted is None else counted.data_ptr(),
        weights=weights.data_ptr(), experts=experts.data_ptr(), tokens=tokens, shares=shares,
        groups_per_token=routing.groups_per_token, shared=routing.shared, normalize=routing.normalize,
        scaling=routing.scaling,
    )  # fmt: skip
    kernel = load_kernel(SOURCE, f"choose_{CHOICES}", device.index or 0)
    kernel.launch((tokens, 1, 1), EXPERTS, arguments, dependent=True)
    return weights, experts
