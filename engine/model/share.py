"""The equal parts into which ranks divide a model: those of a TP group its heads, dense layers and vocabulary, all of a
worker its routed experts.
"""

from dataclasses import dataclass

from engine.model.config import ModelConfig
from engine.model.quantization import WEIGHT_BLOCK
from engine.parallel.layout import Layout
from mesh.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelShare:
    """One of `count` parts, by default the whole."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.count

    def size(self, whole: int) -> int:
        """The size of each part."""
        assert whole % self.count == 0, "check_division lets no such model through"
        return whole // self.count

    def of(self, whole: int) -> slice:
        """Where this part lies in the whole."""
        size = self.size(whole)
        return slice(self.index * size, (self.index + 1) * size)


def check_division(config: ModelConfig, count: int, *, blocks: bool) -> None:
    """Raises ConfigError if a model does not divide into `count` parts.

    blocks: linear layers keep their quantized weights, so that parts consist of whole blocks of them.
    """
    heads, dense = config.num_attention_heads, config.intermediate_size
    has_dense = config.is_dense(0)
    divided = {f"{heads} attention heads": heads, f"vocabulary of {config.vocab_size}": config.vocab_size}
    if has_dense:
        divided[f"dense layers' width of {dense}"] = dense
    if config.draft_layers:
        divided[f"hidden size of {config.hidden_size}, which its MTP module divides"] = config.hidden_size
    for name, size in divided.items():
        if size % count:
            raise ConfigError(f"engine.parallel.tp={count} does not divide the model's {name}")
    if not blocks or count == 1:
        return
    cut = {"queries": heads * config.qk_head_dim, "attention's output": heads * config.v_head_dim}
    if has_dense:
        cut["dense layers"] = dense
    for name, size in cut.items():
        if size // count % WEIGHT_BLOCK:
            raise ConfigError(
                f"engine.parallel.tp={count} cuts the quantized weights of the {name} ({size} wide) within a block of"
                f" {WEIGHT_BLOCK}x{WEIGHT_BLOCK}: choose a smaller tp, or set engine.weights=dequantized"
            )


def check_experts(config: ModelConfig, layout: Layout, *, blocks: bool) -> None:
    """Raises ConfigError if a model's experts do not divide as the layout says.

    blocks: they keep their quantized weights, so that parts of their width consist of whole blocks or groups of them.
    """
    ep, parts, width = layout.ep, layout.width_parts, config.moe_intermediate_size
    cuts = f"engine.parallel.ep={ep} on {layout.world} ranks cuts the experts' width of {width} into {parts} parts"
    if width % parts:
        raise ConfigError(f"{cuts}, which cannot be equal: choose a larger ep")
    if blocks and parts > 1 and width // parts % WEIGHT_BLOCK:
        raise ConfigError(
            f"{cuts}, within a block of {WEIGHT_BLOCK} quantized weights: choose a larger ep, or set"
            " engine.weights=dequantized"
        )
