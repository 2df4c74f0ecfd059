"""What one forward pass knows about its batch, passed down explicitly."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from engine.model.expanded_attention import ExpandedRows
from engine.model.sparse_attention import SparseRow
from engine.model.sparse_meter import SparseMeter
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
    # A latent is this times what the pool holds.
    kv_scale: float
    # A block of the pool that belongs to no request.
    padding_block: int
    # What each row of the last launched batch came to, [most rows] each, for rows behind it: int64, its last token;
    # int32, how many tokens fewer than it could it yields; bool, whether the token behind is a thought.
    drawn: torch.Tensor
    missing: torch.Tensor
    thinks: torch.Tensor
    # [most rows, most drafts] int64: the guesses behind it, NO_TOKEN where there are fewer.
    guessed: torch.Tensor
    # Scratch memory of the stream that runs the steps.
    workspace: Workspace
    # [modules but the last, blocks and two more, hidden]: what an MTP module made of the last token of each block that
    # it has read, for the module behind it; of the padding block; and always zeros, where nothing comes before. None if
    # there is one module.
    draft_states: torch.Tensor | None = None
    # None where prompts are computed exactly, whatever they ask for.
    sparse_meter: SparseMeter | None = None
    # Whether attention of prompts in the expanded form multiplies in e4m3.
    quantized_prompts: bool = False

    @property
    def device(self) -> torch.device:
        return self.kv_pool.device

    @property
    def most_drafts(self) -> int:
        return self.guessed.shape[1]


@dataclass(frozen=True, slots=True)
class SharedLatents:
    """Latents of a chunk that all ranks compute together, each a share of equally many tokens, or fewer."""

    # [share] int64: where this rank writes its share's latents; the padding block, where it lacks one.
    own: torch.Tensor
    # [chunk] int64: by token, its place in the shares of all ranks, one after another.
    order: torch.Tensor
    # [chunk] int64: where each token's latent goes on this rank.
    slots: torch.Tensor


class Cut(Protocol):
    """Ends what is captured of a step; behind it the step's attention runs, and then what is captured next."""

    def __call__(self, between: Callable[..., None], *tensors: torch.Tensor) -> None:
        """between: called with the tensors and the context of a step whenever such a step is run, but not now. The
        tensors' memory belongs to what is captured.
        """
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What layers read of a step's tokens, or of a part of them if these are computed in turns: earlier parts first,
    since later ones may attend to them.

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
    # Every token is in exactly one of these.
    absorbed: list[AbsorbedRows]
    expanded: list[ExpandedRows]
    # [rows] int64: the tokens whose logits are wanted; None if those of every token are.
    sampled: torch.Tensor | None
    # [kv layers, blocks, 64, latent] of the model's dtype, or e4m3.
    kv_pool: torch.Tensor
    # A latent is this times what the pool holds.
    kv_scale: float
    workspace: Workspace
    # Tokens at the end that belong to no row: they pad the step to a size.
    padding: int = 0
    # [own rows] bool: `real` of this rank's share of the rows. Set by the model; padding goes to no expert.
    counted: torch.Tensor | None = None
    # Set if tokens attend to others of their chunk that other ranks compute in this step.
    shared_latents: SharedLatents | None = None
    # The rest of the step is computed while this part waits for other ranks.
    takes_turns: bool = False
    # Some of the tokens, too.
    sparse: list[SparseRow] = field(default_factory=list)
    # Set while a step is captured that may be run for other contexts: attention, which differs, is not.
    cut: Cut | None = None
