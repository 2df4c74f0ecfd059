"""What one forward pass knows of its batch, passed down explicitly."""

from dataclasses import dataclass

import torch

from kernels.mla_decode import DecodePlan


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a prompt: tokens [first, stop) of the batch, and where its whole context lies in the pool."""

    first: int
    stop: int
    # Slots of the cached prefix and of the chunk itself, in order.
    runs: list[slice]
    # Tokens before the chunk, already in the pool.
    cached: int


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Filled by engine.model.inputs, read by every layer. Decoding tokens stand first, one a row, then the chunks."""

    # [tokens] int64.
    token_ids: torch.Tensor
    # [tokens, qk_rope_head_dim / 2] complex64: each token's position.
    rotations: torch.Tensor
    # [tokens] int64: where each token's latent goes.
    slots: torch.Tensor
    decode_tokens: int
    decode_plan: DecodePlan
    chunks: list[Chunk]
    # [rows] int64: the tokens whose next token is wanted.
    sampled: torch.Tensor
    # [kv layers, blocks, 64, latent] of the model's dtype.
    kv_pool: torch.Tensor
