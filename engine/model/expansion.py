"""Keys and values from latents: attention's projection `kv_b_proj`, in the form that the checkpoint has it."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from engine.model.activations import Activations, in_form
from engine.model.allocator import Allocator
from engine.model.config import ModelConfig
from engine.model.expanded_attention import HEADS_TOGETHER
from engine.model.parameters import NamedParameters, whole
from kernels.act_quant import Quantized
from kernels.block_quant import dequantize_blocks
from kernels.fp8_gemm import BLOCK, Workspace, block_scaled, fp8_gemm
from kernels.kv_copy import read_latents, read_quantized


@dataclass(frozen=True, slots=True)
class Latents:
    """Latents of keys as the expansion reads them."""

    # [keys, latent], normalized: of the model's dtype, or e4m3.
    compressed: Activations
    # [keys, rope] of the model's dtype, rotated: the part of the keys that all heads share.
    shared: torch.Tensor


class Expansion(Protocol):
    @property
    def weight(self) -> torch.Tensor:
        """[heads * (nope + value), latent] of the model's dtype, which is multiplied in the absorbed form: there along
        its rows as well as along its columns.
        """

    @property
    def derived_bytes(self) -> int:
        """Bytes that it holds in addition to its parameters."""

    def parameters(self, prefix: str) -> NamedParameters: ...

    def finish(self) -> None:
        """Called once, when all parameters are filled."""

    def computed(self, latents: torch.Tensor) -> Latents:
        """latents: [keys, latent + rope] of this step."""

    def read(self, pool: torch.Tensor, slots: torch.Tensor, scale: float) -> Latents:
        """Latents at these slots of the pool, in order, as `read_latents` takes them."""

    def forward(self, latents: Latents, workspace: Workspace, rows: slice) -> torch.Tensor:
        """Returns [keys, rows] of the model's dtype. rows: of the weight; they begin at a multiple of 128, and end at
        one or with the weight.
        """


class PlainExpansion:
    derived_bytes = 0

    def __init__(self, rows: int, latent: int, allocate: Allocator) -> None:
        self.weight = allocate(rows, latent)

    def parameters(self, prefix: str) -> NamedParameters:
        yield whole(f"{prefix}.weight", self.weight)

    def finish(self) -> None:
        """Nothing to do: the weight is multiplied as it is published."""

    def computed(self, latents: torch.Tensor) -> Latents:
        width = self.weight.shape[1]
        return Latents(latents[:, :width], latents[:, width:])

    def read(self, pool: torch.Tensor, slots: torch.Tensor, scale: float) -> Latents:
        return self.computed(read_latents(pool, slots, self.weight.dtype, scale))

    def forward(self, latents: Latents, workspace: Workspace, rows: slice) -> torch.Tensor:
        assert isinstance(latents.compressed, torch.Tensor)
        return functional.linear(latents.compressed, self.weight[rows])


class Fp8Expansion:
    """Multiplied as it is published, e4m3 in blocks of 128x128 with a scale each, and kept in the model's dtype too."""

    def __init__(self, rows: int, latent: int, allocate: Allocator) -> None:
        self.weight = allocate(rows, latent)
        self._form = allocate.formats.fp8_form
        values = allocate(rows, latent, dtype=torch.float8_e4m3fn)
        self.published = block_scaled(values, allocate(-(-rows // BLOCK), latent // BLOCK, dtype=torch.float32))

    @property
    def derived_bytes(self) -> int:
        return self.weight.numel() * self.weight.itemsize

    def parameters(self, prefix: str) -> NamedParameters:
        yield whole(f"{prefix}.weight", self.published.values)
        yield whole(f"{prefix}.weight_scale_inv", self.published.scales)

    def finish(self) -> None:
        dequantize_blocks(self.published.values, self.published.scales, self.weight)

    def computed(self, latents: torch.Tensor) -> Latents:
        width = self.weight.shape[1]
        return Latents(in_form(latents[:, :width], self._form), latents[:, width:])

    def read(self, pool: torch.Tensor, slots: torch.Tensor, scale: float) -> Latents:
        # The numbers of an e4m3 pool are not rounded twice.
        width, powers = self.weight.shape[1], self._form.powers
        return Latents(*read_quantized(pool, slots, self.weight.dtype, scale, width=width, powers=powers))

    def forward(self, latents: Latents, workspace: Workspace, rows: slice) -> torch.Tensor:
        assert isinstance(latents.compressed, Quantized)
        first, stop, _ = rows.indices(len(self.weight))
        if stop - first == len(self.weight):
            return fp8_gemm(latents.compressed, self.published, workspace)
        assert first % BLOCK == stop % BLOCK == 0
        scales = self.published.scales[first // BLOCK : stop // BLOCK]
        return fp8_gemm(latents.compressed, block_scaled(self.published.values[first:stop], scales), workspace)


def make_expansion(config: ModelConfig, heads: int, allocate: Allocator) -> Expansion:
    """heads: of this rank."""
    each, latent = config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank
    rows, together = heads * each, min(heads, HEADS_TOGETHER) * each
    # A rank's share of the rows may end within a block, and so may heads that are expanded together.
    in_blocks = rows % BLOCK == together % BLOCK == latent % BLOCK == 0
    form = Fp8Expansion if allocate.formats.fp8_expansion and in_blocks else PlainExpansion
    return form(rows, latent, allocate)
