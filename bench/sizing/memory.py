"""Bytes that one GPU of a worker holds of a model's weights, as the engine itself lists them."""

from dataclasses import dataclass

import torch

from engine.exchange.alone import Alone
from engine.model.config import ModelConfig
from engine.parallel.layout import Layout, Place
from engine.weights.loading import make_allocator
from engine.weights.sizes import sizes_of


@dataclass(frozen=True)
class Weights:
    """What one of `gpus` GPUs holds: they share the routed experts; all else is on each of them."""

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
        """In host memory, all of which a step copies to the GPU."""
        return self.offloaded * self.layer_experts


def weights_of(config: ModelConfig, gpus: int) -> Weights:
    """With all experts on the GPUs. Raises ConfigError if they cannot divide these."""
    exchange = Alone(Place(Layout(dp=gpus, ep=gpus)))
    sizes = sizes_of(config, make_allocator(config, torch.bfloat16, torch.device("meta"), "quantized", exchange))
    expert_layers = sum(not config.is_dense(layer) for layer in range(config.num_hidden_layers))
    return Weights(sizes.layer_experts, expert_layers, sizes.weights - expert_layers * sizes.layer_experts)
