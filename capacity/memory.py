"""Bytes of a model's weights that one GPU of a worker holds, and those in host memory."""

from dataclasses import dataclass
from functools import cache

from engine.memory.weight_bytes import weight_bytes
from engine.model.config import ModelConfig
from engine.parallel.layout import Layout


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
    found = weight_bytes(config, Layout(dp=gpus, ep=gpus))
    return Weights(found.layer_experts, found.expert_layers, found.rest + found.drafts)
