"""The size of a rank's weights, before it has any."""

from dataclasses import dataclass

from engine.model.allocator import Allocator
from engine.model.config import ModelConfig
from engine.model.model import Model
from engine.model.moe import MixtureOfExperts
from engine.model.parameters import NamedParameters


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes in bytes."""

    # All that the rank holds.
    weights: int
    # Its experts of one layer, which are as large in all layers that have some; 0 if none has.
    layer_experts: int


def sizes_of(config: ModelConfig, allocate: Allocator) -> Sizes:
    """Counted on a model without memory, whose tensors have the shapes and dtypes of one that computes."""
    model = Model(config, allocate.without_memory())
    mixtures = (layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, MixtureOfExperts))
    first = next(mixtures, None)
    layer_experts = 0 if first is None else _bytes(first.experts.parameters(""))
    return Sizes(_bytes(model.parameters()) + model.derived_bytes(), layer_experts)


def _bytes(parameters: NamedParameters) -> int:
    return sum(each.place.numel() * each.place.itemsize for each in parameters)
