"""Which layers of a model are made with their experts in host memory."""

import logging
from dataclasses import dataclass
from typing import Literal

import torch
from psutil import virtual_memory

from engine.config import ResolvedEngineConfig
from engine.model.allocator import Allocator
from engine.model.config import ModelConfig
from engine.model.model import Model
from engine.model.moe import CHUNK_TOKENS, MixtureOfExperts
from engine.model.parameters import NamedParameters
from engine.offload.choice import GB, MemoryNeed, fewest_layers, spread
from engine.runner.memory_plan import free_bytes, transfer_bytes
from mesh.errors import ConfigError

_log = logging.getLogger("deepmesh.engine")

# Graphs, the sampler, and what libraries take for themselves.
FIXED_WORK_BYTES = 1 << 30
# Tensors of the hidden states' size that a layer holds at a time.
HIDDEN_STATES = 8


@dataclass(frozen=True)
class Offloading:
    """What is known before the model is.

    Attributes:
        kv_tokens: for which "auto" leaves room, with item_bytes a number; fraction: of what is left that KV gets.
    """

    layers: int | Literal["auto"]
    slots: int
    kv_tokens: int | None
    kv_item_bytes: int
    kv_fraction: float
    context_tokens: int | None
    step_tokens: int
    transfer_bytes: int
    memory_share: float
    ranks_a_host: int

    def offloaded(self, config: ModelConfig, allocate: Allocator) -> Allocator:
        """`allocate`, made to offload. All ranks of a worker call it at once, and come to the same layers.

        Raises ConfigError if there are fewer layers with experts, or too little memory.
        """
        with_experts = [index for index in range(config.num_hidden_layers) if not config.is_dense(index)]
        if self.layers == 0 or not with_experts:
            return allocate
        weights, layer_experts = _sizes(config, allocate, with_experts[0])
        layers = self.layers
        if layers == "auto":
            layers = self._fewest(config, allocate, weights, layer_experts, len(with_experts))
        if layers > len(with_experts):
            raise ConfigError(f"engine.offload.layers={layers}: the model has {len(with_experts)} layers with experts")
        if not layers:
            return allocate
        self._check_host(layers, layer_experts)
        _log.info(
            "experts lie in host memory",
            extra={"fields": {
                "layers": layers,
                "of": len(with_experts),
                "host_gb": round(layers * layer_experts / GB, 1),
                "saved_gb": round((layers - self.slots) * layer_experts / GB, 1),
            }},
        )  # fmt: skip
        return allocate.with_offloaded(spread(with_experts, layers), self.slots)

    def _fewest(self, config: ModelConfig, allocate: Allocator, weights: int, layer_experts: int, most: int) -> int:
        if allocate.device.type == "cpu":
            _log.info("engine.offload.layers=auto: on a CPU weights lie in host memory anyway")
            return 0
        longest = min(self.context_tokens or config.max_position_embeddings, config.max_position_embeddings)
        tokens = self.kv_tokens or max(longest, 2 * self.step_tokens)
        token_bytes = config.kv_layers * config.latent_dim * self.kv_item_bytes
        need = MemoryNeed(
            weights=weights,
            layer_experts=layer_experts,
            work=work_bytes(config, self.step_tokens, allocate.dtype.itemsize) + self.transfer_bytes,
            kv=int(tokens * token_bytes / self.kv_fraction),
            free=free_bytes(allocate.device, self.memory_share),
        )
        layers = int(allocate.expert_group.largest(fewest_layers(need, self.slots, most)))
        fields = {f"{name}_gb": round(getattr(need, name) / GB, 1) for name in ("weights", "work", "kv", "free")}
        _log.info("engine.offload.layers=auto", extra={"fields": {"layers": layers, **fields}})
        return layers

    def _check_host(self, layers: int, layer_experts: int) -> None:
        """Ranks that load at once may not have taken theirs yet."""
        wanted, there = layers * layer_experts * self.ranks_a_host, virtual_memory().available
        if wanted > there:
            raise ConfigError(
                f"engine.offload.layers={layers} takes {wanted / GB:.1f} GB of host memory for the host's"
                f" {self.ranks_a_host} ranks, and {there / GB:.1f} GB are free: lower it, or give the host more"
            )


def offloading_of(resolved: ResolvedEngineConfig) -> Offloading:
    config = resolved.config
    return Offloading(
        layers=config.offload.layers,
        slots=config.offload.slots,
        kv_tokens=config.offload.kv_tokens,
        kv_item_bytes=getattr(torch, resolved.kv_dtype).itemsize,
        kv_fraction=resolved.kv_memory_fraction,
        context_tokens=config.context_tokens,
        step_tokens=config.max_step_tokens,
        transfer_bytes=transfer_bytes(config.transfer),
        memory_share=config.memory_share,
        ranks_a_host=config.parallel.ranks_a_host,
    )


def work_bytes(config: ModelConfig, step_tokens: int, item_bytes: int) -> int:
    """About what a step's tensors take, before there is a model to run one: for DeepSeek-R1 and 16,384 tokens 8 GB.

    Queries, keys, values and outputs of all heads, hidden states, and the copies of a chunk's tokens for their experts.
    """
    heads = config.num_attention_heads * 2 * (config.qk_head_dim + config.v_head_dim)
    token_bytes = (heads + HIDDEN_STATES * config.hidden_size) * item_bytes
    copies = config.num_experts_per_tok + config.n_shared_experts
    # A copy in FP8, gate and up, what is between, its form in FP8, and the output.
    copy_bytes = config.hidden_size * (1 + item_bytes) + config.moe_intermediate_size * (3 * item_bytes + 1)
    return FIXED_WORK_BYTES + step_tokens * token_bytes + min(step_tokens, CHUNK_TOKENS) * copies * copy_bytes


def _sizes(config: ModelConfig, allocate: Allocator, layer: int) -> tuple[int, int]:
    """Bytes of this rank's weights, and of the experts of one layer of them."""
    model = Model(config, allocate.without_memory())
    mixture = model.layers[layer].feed_forward
    assert isinstance(mixture, MixtureOfExperts)
    return _bytes(model.parameters()), _bytes(mixture.experts.parameters(""))


def _bytes(parameters: NamedParameters) -> int:
    return sum(each.place.numel() * each.place.itemsize for each in parameters)
