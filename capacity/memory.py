"""Bytes of a model's weights that one GPU of a worker holds, from the engine's own list of tensors."""

from dataclasses import dataclass
from functools import cache

import torch

from engine.exchange.alone import Alone
from engine.model.config import ModelConfig
from engine.parallel.layout import Layout, Place
from engine.weights.loading import make_allocator
from engine.weights.sizes import sizes_of


@dataclass(frozen=True)
class Weights:
    """The weights of one of several GPUs. They divide the routed experts; each has all other weights."""

    # Bytes of one layer's experts, and how many layers have some.
    layer_experts: int
    expert_layers: int
    rest: int
    # Layers whose experts lie in host memory, and how many of these the GPU has room for at a time.
    offloaded: int = 0
    slots: int = 0

    @property
    def experts(self) -> int:
        return (self.expert_layers - self.offloaded + self.slots) * self.layer_experts

    @property
    def total(self) -> int:
        return self.experts + self.rest

    @property
    def host(self) -> int:
        """Bytes in host memory. Every step copies all of them to the GPU."""
        return self.offloaded * self.layer_experts


@cache
def weights_of(config: ModelConfig, gpus: int) -> Weights:
    """The weights with all experts on the GPUs. Raises ConfigError if the GPUs cannot divide the experts."""
    exchange = Alone(Place(Layout(dp=gpus, ep=gpus)))
    sizes = sizes_of(config, make_allocator(config, torch.bfloat16, torch.device("meta"), "quantized", exchange))
    expert_layers = sum(not config.is_dense(layer) for layer in range(config.num_hidden_layers))
    return Weights(sizes.layer_experts, expert_layers, sizes.weights - expert_layers * sizes.layer_experts)
