"""The experts' linear layers with INT4 weights and FP8 activations.

Weights have a scale for each output and group of 128 or 32 inputs, activations one for each row or expert. A group's
products are summed in the tensor cores, then scaled and summed in float32.
"""

from types import ModuleType

import torch

from kernels.moe_permute.layout import Layout
from kernels.w4a8_gemm import reference
from kernels.w4a8_gemm.feed_forward import Int4FeedForward, int4_feed_forward
from kernels.w4a8_gemm.operands import (
    Int4Experts,
    ScaledRows,
    gate_and_up,
    int4_experts,
    pack_published,
    pack_tiles,
    published_places,
    take_turns,
    unpack_tiles,
)
from kernels.w4a8_gemm.profile import profiled

__all__ = [
    "Int4Experts",
    "Int4FeedForward",
    "ScaledRows",
    "few_tokens_feed_forward",
    "gate_and_up",
    "int4_experts",
    "int4_feed_forward",
    "pack_published",
    "pack_tiles",
    "profiled",
    "published_places",
    "take_turns",
    "takes_few_tokens",
    "unpack_tiles",
    "w4a8_feed_forward",
    "w4a8_grouped_gemm",
]


def w4a8_grouped_gemm(x: ScaledRows, weight: Int4Experts, layout: Layout) -> torch.Tensor:
    """Each row times its expert's weight transposed.

    x: [rows, inputs] or [experts, capacity, inputs], as the layout has it. Returns bfloat16 of x's leading dimensions
    and `outputs`; rows that no token has are undefined. No rows give none. The counts are read on the device only. On a
    Hopper GPU our kernel computes it, elsewhere the reference.
    """
    _check(x, weight, layout)
    outputs: torch.Tensor = _backend(weight).w4a8_grouped_gemm(x, weight, layout)
    return outputs


def w4a8_feed_forward(x: ScaledRows, experts: Int4FeedForward, layout: Layout) -> torch.Tensor:
    """`down(silu(gate(x)) * up(x))` of each row's expert, where down's input is rounded to e4m3 by its static scale.

    x: as in `w4a8_grouped_gemm`, with static scales. Returns bfloat16 of x's shape; rows that no token has are
    undefined. On a Hopper GPU this is one kernel, in which values are quantized without becoming bfloat16 before.
    """
    _check(x, experts.gate_up, layout)
    assert x.static
    outputs: torch.Tensor = _backend(experts.gate_up).w4a8_feed_forward(x, experts, layout)
    return outputs


def takes_few_tokens(x: torch.Tensor, choices: torch.Tensor, experts: Int4FeedForward) -> bool:
    """Whether `few_tokens_feed_forward` computes this, and is the faster way: one or two tokens on a Hopper GPU, and
    experts that are not large.

    x: [tokens, hidden]; choices: [tokens, k] int64.
    """
    if not x.is_cuda:
        return False
    from kernels.w4a8_gemm import few_tokens

    return few_tokens.takes(x, choices, experts)


def few_tokens_feed_forward(
    x: torch.Tensor,
    choices: torch.Tensor,
    experts: Int4FeedForward,
    pre_scale: torch.Tensor | None,
    input_scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize tokens as `kernels.expert_rows.place_rows` does, and compute `w4a8_feed_forward` of them.

    x: [tokens, hidden] bfloat16, contiguous; choices: [tokens, k] int64, contiguous, distinct within a token, each an
    expert or negative; pre_scale: [hidden] float32, by which channels are multiplied; input_scale: float32, at least
    one element, all equal. Returns rows [tokens * k, hidden] bfloat16, and positions [tokens, k] int64: the row of each
    choice, NOWHERE of a negative one. Rows of negative choices are undefined.
    """
    from kernels.w4a8_gemm import few_tokens

    assert takes_few_tokens(x, choices, experts) and x.is_contiguous() and choices.is_contiguous()
    assert choices.dtype == torch.int64 and (pre_scale is None or pre_scale.shape == x.shape[1:])
    return few_tokens.feed_forward(x, choices, experts, pre_scale, input_scale)


def _check(x: ScaledRows, weight: Int4Experts, layout: Layout) -> None:
    experts, _, inputs = weight.shape
    assert x.values.shape == (*layout.shape, inputs)
    assert not x.static or x.scales.shape == (experts,)


def _backend(weight: Int4Experts) -> ModuleType:
    if weight.tiles.is_cuda:
        # Imported only here: CUDA's bindings come with a CUDA build of torch.
        from kernels.w4a8_gemm import warpgroups

        if warpgroups.takes(weight):
            return warpgroups
    return reference
