"""What one forward pass knows about its batch, passed down explicitly."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from engine.model.expanded_attention import ExpandedRows
from engine.model.indexed_rows import IndexedRows
from engine.model.masked_rows import MaskedRows
from engine.model.sparse_attention import SparseMeter, SparseRow
from kernels.draft_check.pinned import PinnedAcceptance
from kernels.fp8_gemm import Workspace
from kernels.mla_decode import DecodePlan


@dataclass(frozen=True, slots=True)
class AbsorbedRows:
    """Tokens [first, stop) of the batch that attend in the absorbed form: rows of equal length, one after another."""

    first: int
    stop: int
    plan: DecodePlan


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What outlives a step on the device. Owned by engine.runner."""

    # [positions, qk_rope_head_dim / 2] complex64: of `model_rotations`, for every position served.
    rotations: torch.Tensor
    # [kv layers, blocks, 64, latent] of the model's dtype, or e4m3.
    kv_pool: torch.Tensor
    # A latent is the number that the pool holds times this.
    kv_scale: float
    # A block of the pool that belongs to no request.
    padding_block: int
    # For rows that follow rows of the last launched batch, [most rows] each: int64, a row's last token; int32, how many
    # tokens fewer it yields than it could; bool, whether the next token is inside `<think>`.
    drawn: torch.Tensor
    missing: torch.Tensor
    thinks: torch.Tensor
    # [most rows, most drafts] int64: the guesses after each row, NO_TOKEN where there are fewer.
    guessed: torch.Tensor
    # Scratch memory of the stream that runs the steps.
    workspace: Workspace
    # [kv layers, blocks, 64, ...]: index keys, in the form of `kernels.index_keys`; None if the model has no indexers.
    index_pool: torch.Tensor | None = None
    # How many tokens its indexers select.
    top_k: int = 0
    # The position of the first token that attends to latents, if it selects: those before attend to expanded keys, with
    # a mask. 0 if none do.
    masked_until: int = 0
    # [modules but the last, blocks and two more, hidden]: by block, the hidden state of a module for the last token of
    # the block that it has computed, which the next module reads. The last two entries are the padding block's, and
    # zeros for a row's first token. None if there is one module.
    draft_states: torch.Tensor | None = None
    # None if sparse attention is not offered: all prompts are computed exactly.
    sparse_meter: SparseMeter | None = None
    # None if drafts count as right where they are.
    pinned: PinnedAcceptance | None = None
    # Whether attention of prompts in the expanded form multiplies in e4m3.
    quantized_prompts: bool = False

    @property
    def device(self) -> torch.device:
        return self.kv_pool.device

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        """What makes a block of KV, [kv layers, blocks, bytes] uint8 each: its bytes in a layer are those of the first
        plane, then those of the next one. Not every operation takes one-byte floats, so all are viewed as bytes.
        """
        pools = (self.kv_pool,) if self.index_pool is None else (self.kv_pool, self.index_pool)
        return tuple(pool.view(torch.uint8).flatten(2) for pool in pools)

    @property
    def most_drafts(self) -> int:
        return self.guessed.shape[1]


@dataclass(frozen=True, slots=True)
class SharedLatents:
    """Latents of a chunk that all ranks compute together: each rank has a share of equally many tokens, or fewer."""

    # [share] int64: where this rank writes its share's latents; in the padding block for tokens that it lacks.
    own: torch.Tensor
    # [chunk] int64: by token, its place in the shares of all ranks, one after another.
    order: torch.Tensor
    # [chunk] int64: where each token's latent goes on this rank.
    slots: torch.Tensor


class Cut(Protocol):
    """Ends a captured piece of a step. After it the step's attention runs, then the piece that is captured next."""

    def __call__(self, between: Callable[..., None], *tensors: torch.Tensor) -> None:
        """between: called with the tensors and a step's context whenever a captured step is run, but not now. The
        tensors' memory belongs to what is captured.
        """
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What layers read of a step's tokens, or of a part of them if parts take turns.

    Filled by engine.model.inputs, read by every layer.
    """

    # [tokens] int64.
    token_ids: torch.Tensor
    # [tokens, qk_rope_head_dim / 2] complex64: each token's position.
    rotations: torch.Tensor
    # [tokens] int64: where each token's latent goes.
    slots: torch.Tensor
    # [tokens] bool: whether a token belongs to a row of the batch; others pad the step, or fill a graph up.
    real: torch.Tensor
    # Every token of a row is in exactly one entry of these, of `indexed`, of `masked` and of `sparse`.
    absorbed: list[AbsorbedRows]
    expanded: list[ExpandedRows]
    # [rows] int64: the tokens whose logits are wanted; None if those of every token are.
    sampled: torch.Tensor | None
    # [kv layers, blocks, 64, latent] of the model's dtype, or e4m3.
    kv_pool: torch.Tensor
    # A latent is the number that the pool holds times this.
    kv_scale: float
    workspace: Workspace
    # Tokens at the end that belong to no row: they pad the step to a size.
    padding: int = 0
    # Tokens at the start that belong to rows that decode. What they attend to is their own rows', and not other ranks'.
    decoding: int = 0
    # [own rows] bool: `real` of this rank's share of the rows. Set by the model; padding goes to no expert.
    counted: torch.Tensor | None = None
    # Set if tokens attend to others of their chunk that other ranks compute in this step.
    shared_latents: SharedLatents | None = None
    # As of DeviceState.
    index_pool: torch.Tensor | None = None
    # Rows that attend to what indexers select; see `absorbed`.
    indexed: list[IndexedRows] = field(default_factory=list)
    # Rows that attend to these in the expanded form; see `absorbed`.
    masked: list[MaskedRows] = field(default_factory=list)
    # Rows whose attention is sparse; see `absorbed`.
    sparse: list[SparseRow] = field(default_factory=list)
    # Set while a step is captured to be run for other contexts too: attention differs between them, and is not
    # captured.
    cut: Cut | None = None

    def in_latents(self) -> list[AbsorbedRows | IndexedRows]:
        """The rows that attend in the absorbed form."""
        return [*self.absorbed, *self.indexed]

    def only_in_latents(self) -> AbsorbedRows | IndexedRows | None:
        """The rows of all tokens, if they attend together in the absorbed form and nothing pads the step."""
        rows, others = self.in_latents(), self.expanded or self.masked or self.sparse or self.padding
        return rows[0] if len(rows) == 1 and not others else None
