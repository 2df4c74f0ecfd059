"""Which layers' experts lie in host memory. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from mesh.errors import ConfigError

GB = 1e9


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of a rank's GPU."""

    # Bytes of the whole model, and of one layer's experts, which are as large in all layers.
    weights: int
    layer_experts: int
    # What the largest step, graphs and transfers take.
    work: int
    # The least KV pool.
    kv: int
    # What there is for all of it.
    free: int

    @property
    def lacking(self) -> int:
        """Bytes that are lacking; negative if something is left."""
        return self.weights + self.work + self.kv - self.free


def fewest_layers(need: MemoryNeed, slots: int, most: int) -> int:
    """How many layers' experts have to lie in host memory, 0 if all fit. slots: layers that the GPU has room for at a
    time; most: how many have experts.

    Raises ConfigError if the rest does not fit even then.
    """
    if need.lacking <= 0:
        return 0
    layers = slots - -need.lacking // need.layer_experts
    if layers > most:
        rest = need.weights - (most - slots) * need.layer_experts
        raise ConfigError(
            f"engine.offload.layers=auto: without the experts of all {most} layers a GPU still needs"
            f" {rest / GB:.1f} GB for weights, {need.work / GB:.1f} GB for steps and {need.kv / GB:.1f} GB for KV, and"
            f" {need.free / GB:.1f} GB are free: take more GPUs, or lower engine.max_step_tokens or"
            " engine.offload.kv_tokens"
        )
    return layers


def spread(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` of the layers at even distances, the first one among them. As many layers follow the last one as lie
    between two, so that the first one's experts can be copied back for the next step.
    """
    assert 0 <= count <= len(layers)
    return tuple(layers[index * len(layers) // count] for index in range(count))
