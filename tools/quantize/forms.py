"""Chooses the form in which each tensor of a checkpoint is stored."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from engine.model.quantization import POWER_SCALES, LinearKind, Stored
from engine.weights.nvfp4 import linear_kind
from mesh.errors import ConfigError
from tools.checkpoint_tensors import TensorSpec
from tools.quantization_configs import FP8_CONFIG, NVFP4_CONFIG, W4A8_CONFIG

_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")
_NUMBER = re.compile(r"\.\d+(?=\.)")


class Format(Enum):
    # Every linear weight in FP8 blocks of 128x128.
    FP8 = "fp8"
    # Routed experts in INT4, every other linear weight in FP8.
    W4A8 = "w4a8"
    # Some sets of layers in NVFP4, everything else in bfloat16.
    NVFP4 = "nvfp4"


class LayerSet(Enum):
    """Layers that are in NVFP4 together or not at all, as the engine loads them."""

    # Routed experts.
    EXPERTS = "experts"
    # Dense layers and shared experts.
    FEED_FORWARD = "feed-forward"
    # The projection after attention.
    OUTPUT = "output"


def parse_layers(text: str) -> frozenset[LayerSet]:
    """text: names joined by commas. Raises ConfigError for one that is unknown."""
    known = [each.value for each in LayerSet]
    for name in text.split(","):
        if name not in known:
            raise ConfigError(f"unknown layers {name!r}: expected any of {', '.join(known)}, joined by commas")
    return frozenset(map(LayerSet, text.split(",")))


@dataclass(frozen=True, slots=True)
class Target:
    """The form of the checkpoint that is made."""

    form: Format
    # The layers in NVFP4, if that is the form.
    layers: frozenset[LayerSet] = frozenset(LayerSet)

    def stored(self, spec: TensorSpec) -> Stored:
        """The form in which one of its tensors is stored."""
        if not spec.quantizable:
            return Stored.PLAIN
        match self.form:
            case Format.FP8:
                return Stored.FP8
            case Format.W4A8:
                return Stored.INT4 if is_expert(spec.name) else Stored.FP8
            case Format.NVFP4:
                return Stored.NVFP4 if _layer_set(spec.name) in self.layers else Stored.PLAIN

    def config(self, specs: Iterable[TensorSpec], *, power_scales: bool) -> dict[str, Any]:
        """Its `quantization_config`. specs: all of its tensors; power_scales: of activations, as in `Quantization`."""
        match self.form:
            case Format.FP8:
                return dict(FP8_CONFIG)
            case Format.W4A8:
                return {**W4A8_CONFIG, **({"scale_fmt": POWER_SCALES} if power_scales else {})}
            case Format.NVFP4:
                return {**NVFP4_CONFIG, "ignore": self._plain_matrices(specs)}

    def _plain_matrices(self, specs: Iterable[TensorSpec]) -> list[str]:
        """The modules of matrices that are not quantized, with * for numbers, as ModelOpt lists them."""
        plain = [spec.name for spec in specs if len(spec.shape) == 2 and self.stored(spec) is Stored.PLAIN]
        return sorted({_NUMBER.sub(".*", name.removesuffix(".weight")) for name in plain})


def is_expert(name: str) -> bool:
    """Whether the tensor of this name belongs to a routed expert."""
    return bool(_EXPERT.search(name))


def _layer_set(name: str) -> LayerSet | None:
    if is_expert(name):
        return LayerSet.EXPERTS
    match linear_kind(name):
        case LinearKind.FEED_FORWARD:
            return LayerSet.FEED_FORWARD
        case LinearKind.OUTPUT:
            return LayerSet.OUTPUT
        case _:
            return None
