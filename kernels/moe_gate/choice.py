"""The choice of experts on Hopper, as DeepSeek-V3's and V2's gates make it: `cuda/choice.cu`."""

from pathlib import Path

import torch

from kernels.hopper import is_hopper
from kernels.moe_gate.reference import Routing
from kernels.nvrtc import load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "choice.cu"
Arguments = structure(SOURCE, "Arguments")
# What the source supports: experts, groups, a token's choices, and whether affinities are a softmax.
KERNELS = {
    (256, 8, 8, False): "choose_8_of_256",
    (160, 8, 6, True): "choose_6_of_160_softmax",
    (64, 1, 6, True): "choose_6_of_64_softmax",
}
# The source's groups, which a gate without groups has too; threads of a CTA; with more tokens one warp a token is
# faster.
GROUPS, SLOTS, MOST_TOKENS = 8, 256, 256
# The most shares that a CTA adds up, and the most places of a token.
MOST_SHARES, MOST_PLACES = 16, 32


def takes(logits: torch.Tensor, routing: Routing) -> bool:
    """Whether the source supports this. logits: [shares, tokens, experts]."""
    shares, tokens, experts = logits.shape
    few = shares <= MOST_SHARES and tokens <= MOST_TOKENS and routing.places <= MOST_PLACES
    return is_hopper() and _kind(experts, routing) in KERNELS and few


def _kind(experts: int, routing: Routing) -> tuple[int, int, int, bool]:
    return experts, routing.groups, routing.experts_per_token, routing.softmax


def moe_gate(
    logits: torch.Tensor, bias: torch.Tensor, routing: Routing, counted: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits: [shares, tokens, experts], which it `takes`."""
    assert takes(logits, routing)
    (shares, tokens, listed), device = logits.shape, logits.device
    weights = torch.empty(tokens, routing.places, dtype=torch.float32, device=device)
    experts = torch.empty(tokens, routing.places, dtype=torch.int64, device=device)
    if not tokens:
        return weights, experts
    arguments = Arguments(
        logits=logits.data_ptr(), bias=bias.data_ptr(), counted=None if counted is None else counted.data_ptr(),
        weights=weights.data_ptr(), experts=experts.data_ptr(), tokens=tokens, shares=shares,
        groups_per_token=GROUPS if routing.groups == 1 else routing.groups_per_token, shared=routing.shared,
        normalize=routing.normalize, scaling=routing.scaling,
    )  # fmt: skip
    kernel = load_kernel(SOURCE, KERNELS[_kind(listed, routing)], device.index or 0)
    kernel.launch((tokens, 1, 1), SLOTS, arguments, dependent=True)
    return weights, experts
