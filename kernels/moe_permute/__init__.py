"""Copies tokens to the rows of their experts, and adds up the experts' outputs by weight.

Tokens may choose among more experts than are placed: these are `expert_count` from number `first` on, and `elsewhere`
is how many others there are. A choice of another gets no row, its position is NOWHERE, and it adds nothing.
"""

from types import ModuleType

import torch

from kernels.act_quant.quantized import Quantized
from kernels.moe_permute import reference
from kernels.moe_permute.experts import ExpertOutputs
from kernels.moe_permute.layout import (
    NOWHERE,
    ContiguousLayout,
    ExpandedQuantized,
    Layout,
    MaskedLayout,
    expected_rows,
)
from kernels.moe_permute.reference import RowsByExpert

__all__ = [
    "NOWHERE",
    "ContiguousLayout",
    "ExpandedQuantized",
    "ExpertOutputs",
    "Layout",
    "MaskedLayout",
    "RowsByExpert",
    "choose_layout",
    "combine",
    "expand",
    "expand_contiguous",
    "expand_masked",
    "expand_quantized",
    "masked_capacity",
]

# A tile of a grouped product must not lie in the rows of two experts.
ALIGNMENT = 128
# Up to this many expected rows an expert, reading the weights takes longer than the products, and a masked layout
# wastes nothing.
MASKED_EXPECTED_ROWS = 64
# The most rows of a masked layout, shared experts aside: some 2.3 GB at DeepSeek's widths, no more than prompts take.
# That is what 256 tokens of each of four ranks need on a rank with a quarter of the experts and room for eight copies
# of others.
MASKED_ROWS = 72 * 1024


def expand(x: torch.Tensor, experts: torch.Tensor, expert_count: int, first: int = 0) -> RowsByExpert:
    """Copy each token once per chosen expert, ordered by expert.

    x: [tokens, width]; experts: [tokens, k] int64, both contiguous. The result holds `rows` [tokens * k, width], `ends`
    [expert_count] int32 (where each expert's rows end) and `positions` [tokens, k] int64 (the row of each token and
    chosen expert). If choices have no row, there are fewer rows on a CPU; on a GPU the last ones belong to no choice
    and are not written. No tokens give no rows.
    """
    assert experts.shape[0] == x.shape[0] and experts.dtype == torch.int64
    assert x.is_contiguous() and experts.is_contiguous()
    expanded: RowsByExpert = _backend(experts).expand(x, experts, expert_count, first)
    return expanded


def expand_quantized(
    x: Quantized, experts: torch.Tensor, expert_count: int, shared: int = 0, first: int = 0, elsewhere: int = 0
) -> ExpandedQuantized:
    """Copy each token once per chosen expert, in the layout that makes the FP8 products fastest.

    That is the masked one for few tokens an expert, the contiguous one for more. x: [tokens, width]; experts:
    [tokens, k] int64, contiguous, distinct within a token. shared: the number of shared experts, the last ones, which
    every token has; they count neither for the rows an expert expects nor for the memory.
    """
    if _few_rows(experts, expert_count, shared, elsewhere):
        return expand_masked(x, experts, expert_count, shared, first, elsewhere)
    return expand_contiguous(x, experts, expert_count, first)


def choose_layout(experts: torch.Tensor, expert_count: int, first: int = 0, elsewhere: int = 0) -> Layout:
    """The layout that `expand_quantized` chooses if no expert is shared. Backend of masked ones: the reference."""
    capacity = masked_capacity(experts, expert_count, elsewhere)
    if capacity is not None:
        return reference.masked_layout(experts, expert_count, capacity, 0, first, elsewhere)
    return contiguous_layout(experts, expert_count, first)


def masked_capacity(experts: torch.Tensor, expert_count: int, elsewhere: int = 0) -> int | None:
    """Rows that an expert has room for in the layout of `choose_layout`; None if that is contiguous."""
    return _capacity(experts.shape[0]) if _few_rows(experts, expert_count, 0, elsewhere) else None


def contiguous_layout(experts: torch.Tensor, expert_count: int, first: int = 0) -> ContiguousLayout:
    """The layout of `expand_contiguous`."""
    rows = _contiguous_rows(experts, expert_count)
    layout: ContiguousLayout = _backend(experts).contiguous_layout(experts, expert_count, ALIGNMENT, rows, first)
    return layout


def expand_contiguous(x: Quantized, experts: torch.Tensor, expert_count: int, first: int = 0) -> ExpandedQuantized:
    """Copy tokens to rows in order of expert, then of token; each expert's rows are padded to a multiple of 128.

    x and experts: as in `expand_quantized`. The number of rows is the most that any choice can need, a multiple of 128.
    """
    _check(x, experts)
    rows = _contiguous_rows(experts, expert_count)
    expanded: ExpandedQuantized = _backend(experts).expand_contiguous(x, experts, expert_count, ALIGNMENT, rows, first)
    return expanded


def expand_masked(
    x: Quantized, experts: torch.Tensor, expert_count: int, shared: int = 0, first: int = 0, elsewhere: int = 0
) -> ExpandedQuantized:
    """Copy tokens to rows of a layout in which each expert has room for every token, in order of token.

    x, experts and shared: as in `expand_quantized`.
    """
    _check(x, experts)
    layout = (expert_count, _capacity(experts.shape[0]), shared, first, elsewhere)
    expanded: ExpandedQuantized = _backend(experts).expand_masked(x, experts, *layout)
    return expanded


def combine(
    outputs: ExpertOutputs, part: torch.Tensor | None = None, first: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Add up the outputs by weight, and the shared ones, in float32: [tokens, width] of the rows' dtype.

    part: [some tokens, width] of that dtype, contiguous; if given, it is added to those from token `first` on. out: if
    given, receives the sums; it may be `outputs.shared`.
    """
    assert part is None or (outputs.shared is None and part.is_contiguous() and part.dtype == outputs.rows.dtype)
    assert part is None or first + len(part) <= outputs.shape[0]
    assert out is None or (out.shape == outputs.shape and out.is_contiguous() and out.dtype == outputs.rows.dtype)
    combined: torch.Tensor = _backend(outputs.rows).combine(outputs, part, first, out)
    return combined


def _check(x: Quantized, experts: torch.Tensor) -> None:
    assert x.values.dim() == 2 and x.values.shape[0] == experts.shape[0]
    assert experts.dim() == 2 and experts.dtype == torch.int64 and experts.is_contiguous()


def _few_rows(experts: torch.Tensor, expert_count: int, shared: int, elsewhere: int) -> bool:
    """Whether a masked layout is the faster one, and has room."""
    tokens, choices = experts.shape
    few = expected_rows(tokens, choices, expert_count + elsewhere, shared) <= MASKED_EXPECTED_ROWS
    return few and _capacity(tokens) * (expert_count - shared) <= MASKED_ROWS


def _contiguous_rows(experts: torch.Tensor, expert_count: int) -> int:
    choices = experts.numel()
    return (choices + min(expert_count, choices) * (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT


def _capacity(tokens: int) -> int:
    """The rows of an expert that has every token, in whole tiles of grouped products."""
    return 64 if tokens <= 64 else -(-tokens // ALIGNMENT) * ALIGNMENT


def _backend(x: torch.Tensor) -> ModuleType:
    if x.is_cuda:
        from kernels.moe_permute import triton

        return triton
    return reference
