"""What one forward pass knows of its batch, passed down explicitly."""

from dataclasses import dataclass

import torch

from kernels.mla_decode import DecodePlan
from kernels.mla_prefill import PrefillPlan


@dataclass(frozen=True, slots=True)
class Absorbed:
    """Tokens [first, stop) of the batch that attend in the absorbed form: rows of equal length, one after another."""

    first: int
    stop: int
    plan: DecodePlan


@dataclass(frozen=True, slots=True)
class Expanded:
    """Tokens [first, stop) of the batch, one row's, that attend in the expanded form."""

    first: int
    stop: int
    plan: PrefillPlan
    # [context] int64: slots of its cached prefix, then of the row itself; None where no prefix is cached.
    known: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Filled by engine.model.inputs, read by every layer."""

    # [tokens] int64.
    token_ids: torch.Tensor
    # [tokens, qk_rope_head_dim / 2] complex64: each token's position.
    rotations: torch.Tensor
    # [tokens] int64: where each token's latent goes.
    slots: torch.Tensor
    # Together every token once.
    absorbed: list[Absorbed]
    expanded: list[Expanded]
    # [rows] int64: the tokens whose next token is wanted.
    sampled: torch.Tensor
    # [kv layers, blocks, 64, latent] of the model's dtype, or e4m3.
    kv_pool: torch.Tensor
