"""Which layers of a model are made with their experts in host memory."""

import logging

import torch
from psutil import virtual_memory

from engine.memory.free_memory import free_bytes
from engine.memory.memory_plan import copy_bytes
from engine.memory.rank_memory import work_bytes
from engine.model.allocator import Allocator
from engine.model.config import ModelConfig
from engine.model.expert_group import ExpertGroup
from engine.offload.choice import GB, MemoryNeed, fewest_layers, spread
from engine.settings.device import ResolvedEngineConfig
from engine.weights.sizes import Sizes, sizes_of
from mesh.blocks import BLOCK_TOKENS
from mesh.errors import ConfigError

_log = logging.getLogger("deepmesh.engine")


class Offloading:
    """The offloading that a configuration asks for, before there is a model."""

    def __init__(self, resolved: ResolvedEngineConfig) -> None:
        self._resolved = resolved
        self._config = resolved.config
        self._asked = resolved.config.offload

    def offloaded(self, model: ModelConfig, allocate: Allocator) -> Allocator:
        """`allocate`, made to offload. All ranks of a worker call it at once, and come to the same layers.

        Raises ConfigError if there are fewer layers with experts, or too little memory.
        """
        with_experts = [index for index in range(model.num_hidden_layers) if not model.is_dense(index)]
        layers = self._asked.layers
        if layers != "auto" and layers > len(with_experts):
            raise ConfigError(f"engine.offload.layers={layers}: the model has {len(with_experts)} layers with experts")
        if layers == 0 or not with_experts:
            return allocate
        sizes = sizes_of(model, allocate)
        if layers == "auto":
            layers = self._fewest(model, allocate, sizes, len(with_experts))
        if layers == 0:
            return allocate
        self._check_host(allocate.expert_group, layers * sizes.layer_experts)
        _log.info(
            "experts lie in host memory",
            extra={"fields": {
                "layers": layers,
                "of": len(with_experts),
                "host_gb": round(layers * sizes.layer_experts / GB, 1),
                "saved_gb": round((layers - self._asked.slots) * sizes.layer_experts / GB, 1),
            }},
        )  # fmt: skip
        return allocate.with_offloaded(spread(with_experts, layers), self._asked.slots)

    def _fewest(self, model: ModelConfig, allocate: Allocator, sizes: Sizes, most: int) -> int:
        if allocate.device.type == "cpu":
            _log.info("engine.offload.layers=auto: on a CPU weights lie in host memory anyway")
            return 0
        work = work_bytes(model, self._config.max_step_tokens, allocate.dtype.itemsize, allocate.expert_group.ranks)
        need = MemoryNeed(
            weights=sizes.weights,
            layer_experts=sizes.layer_experts,
            work=work + copy_bytes(self._config, BLOCK_TOKENS * model.kv_token_bytes(self._item_bytes)),
            kv=self._least_kv_bytes(model),
            # The least of all ranks, so that all come to the same number of layers.
            free=allocate.expert_group.least(free_bytes(allocate.device, self._config.memory_share)),
        )
        layers = fewest_layers(need, self._asked.slots, most)
        fields = {f"{name}_gb": round(getattr(need, name) / GB, 1) for name in ("weights", "work", "kv", "free")}
        _log.info("engine.offload.layers=auto", extra={"fields": {"layers": layers, **fields}})
        return layers

    def _least_kv_bytes(self, model: ModelConfig) -> int:
        config = self._config
        longest = min(config.context_tokens or model.max_position_embeddings, model.max_position_embeddings)
        tokens = self._asked.kv_tokens or max(longest, 2 * config.max_step_tokens)
        if config.parallel.divided_tokens is not None and config.parallel.context_parallel_reach is not None:
            # Room for a prompt of another rank. By default it takes a part of what there is.
            tokens += min(longest, config.parallel.context_parallel_reach)
        return int(tokens * model.kv_token_bytes(self._item_bytes) / self._resolved.kv_memory_fraction)

    @property
    def _item_bytes(self) -> int:
        """Bytes of a number in KV."""
        size: int = getattr(torch, self._resolved.kv_dtype).itemsize
        return size

    def _check_host(self, group: ExpertGroup, rank_bytes: int) -> None:
        """Called before any rank has taken its part of the memory."""
        ranks, there = self._config.parallel.ranks_a_host, group.least(virtual_memory().available)
        if ranks * rank_bytes > there:
            raise ConfigError(
                f"engine.offload takes {ranks * rank_bytes / GB:.1f} GB of host memory for the host's {ranks} ranks,"
                f" and {there / GB:.1f} GB are free: lower engine.offload.layers, or give the host more"
            )
