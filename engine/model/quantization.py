"""In which form a checkpoint stores its weights, as its `quantization_config` says."""

from dataclasses import dataclass
from enum import Enum, auto

from engine.model.reader import Reader
from mesh.errors import CheckpointError

WEIGHT_BLOCK = 128


class Stored(Enum):
    # bfloat16, float16 or float32.
    PLAIN = auto()
    # e4m3 in blocks of 128x128 with a scale each.
    FP8 = auto()


@dataclass(frozen=True, slots=True)
class Quantization:
    # Linear layers of attention, dense feed-forward layers and shared experts.
    linear: Stored = Stored.PLAIN
    # Routed experts.
    experts: Stored = Stored.PLAIN

    @property
    def quantized(self) -> bool:
        return self != Quantization()


def parse_quantization(section: Reader | None) -> Quantization:
    """section: `quantization_config`. Raises CheckpointError naming what is not supported."""
    if section is None:
        return Quantization()
    method, block = section.text("quant_method"), section.text("weight_block_size")
    if method != "fp8":
        raise CheckpointError(f"quantization {method!r} is not supported: expected 'fp8' or none")
    if block != str([WEIGHT_BLOCK, WEIGHT_BLOCK]):
        raise CheckpointError(f"weight_block_size is {block}: expected [{WEIGHT_BLOCK}, {WEIGHT_BLOCK}]")
    return Quantization(linear=Stored.FP8, experts=Stored.FP8)
