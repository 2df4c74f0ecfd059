"""What a layer of experts needs of few tokens, from one kernel."""

from typing import NamedTuple

import torch

from kernels.moe_permute.layout import ListedRows


class Listed(NamedTuple):
    """Rows to which a delta was added, normalized, with their experts."""

    # [tokens, width]
    plain: torch.Tensor
    # Both [tokens, places], as `kernels.moe_gate.moe_gate` returns them.
    weights: torch.Tensor
    experts: torch.Tensor
    # The rows of all choices, shared experts' too.
    rows: ListedRows
