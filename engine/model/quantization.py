"""In which form a checkpoint stores its weights, by `config.json` or by TensorRT-LLM's files next to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from engine.model.json_reader import JsonReader, read_json
from mesh.errors import CheckpointError

WEIGHT_BLOCK = 128
WEIGHT_GROUP = 128
COMPRESSED_GROUPS = (32, 128)
# By name of TensorRT-LLM's algorithms.
EXPERTS_ALGORITHM, LINEAR_ALGORITHM = "W4A8_AWQ", "FP8_BLOCK_SCALES"
NVFP4_ALGORITHM = "NVFP4"
# What `scale_fmt` says of scales that are powers of two.
POWER_SCALES = "ue8m0"


# How weights are kept: as they are published, or in the model's dtype. The others are as "quantized", and say how plain
# weights are quantized when they are loaded.
KeptWeights = Literal["quantized", "dequantized", "fp8", "w4a8"]


class Stored(Enum):
    # bfloat16, float16 or float32.
    PLAIN = auto()
    # e4m3 in blocks of 128x128 with a scale each.
    FP8 = auto()
    # Signed, two a byte, groups of 128 or 32 inputs with a scale each.
    INT4 = auto()
    # e2m1, two a byte, groups of 16 inputs with an e4m3 scale each and a scale over each matrix.
    NVFP4 = auto()
    # Eight to an int32, with zero points, as AWQ and GPTQ pack them; only dequantized, or quantized again.
    PACKED = auto()


class LinearKind(Enum):
    """Linear layers, by what they do in a decoder layer."""

    # The first projections of attention's queries and latents.
    INPUT = auto()
    # Queries from what the first projection compressed.
    QUERY = auto()
    # The indexer's queries and keys.
    INDEX = auto()
    # After attention.
    OUTPUT = auto()
    # Dense layers and shared experts.
    FEED_FORWARD = auto()


@dataclass(frozen=True, slots=True)
class Quantization:
    # Linear layers: all of them, or those that are not in NVFP4.
    linear: Stored = Stored.PLAIN
    # Routed experts.
    experts: Stored = Stored.PLAIN
    # Inputs that share a scale of INT4 experts.
    group: int = WEIGHT_GROUP
    # Whether INT4 experts are packed as compressed-tensors packs them; linear layers are then published plain.
    compressed: bool = False
    # Whether the checkpoint has scales for the inputs of its INT4 experts, from calibration; its tensors decide.
    static_inputs: bool = False
    # Whether it has AWQ's scales for the channels of these inputs; its tensors decide.
    pre_scaled: bool = False
    # Which linear layers are in NVFP4; a checkpoint's tensors decide.
    nvfp4: frozenset[LinearKind] = frozenset()
    # Whether activations are quantized for FP8 products with scales that are powers of two (`scale_fmt: ue8m0`).
    power_scales: bool = False
    # Whether indexers are plain although other linear layers are not; its tensors decide.
    plain_indexers: bool = False

    def linear_of(self, kind: LinearKind) -> Stored:
        if kind is LinearKind.INDEX and self.plain_indexers:
            return Stored.PLAIN
        return Stored.NVFP4 if kind in self.nvfp4 else self.linear

    @property
    def has_blocks(self) -> bool:
        """Whether linear layers are in blocks or groups, which cannot be cut anywhere."""
        return bool(self.nvfp4) or self.linear is not Stored.PLAIN

    @property
    def quantized(self) -> bool:
        return self != Quantization()

    @property
    def packed(self) -> bool:
        """Whether weights have a form that is not multiplied here: they are dequantized, or quantized again."""
        return self.experts is Stored.PACKED

    @property
    def takes_rounding(self) -> bool:
        """Whether weights may be quantized when they are loaded: they are plain, or another tool packed them."""
        return self.packed or self.compressed or not self.quantized

    def kept(self, weights: KeptWeights) -> "Quantization":
        """In which form a model keeps its weights."""
        if weights == "dequantized":
            return Quantization()
        if weights == "quantized" or not self.takes_rounding:
            return self
        at_load = AT_LOAD[weights]
        # Experts that are in INT4 need no other rounding.
        return replace(self, linear=at_load.linear) if self.compressed and at_load.experts is Stored.INT4 else at_load


# What to do about a model whose weights another tool packed.
PACKED_NEEDS = (
    "the checkpoint's INT4 weights are packed as no kernel multiplies them: quantize it once with deepmesh quantize DIR"
    " --format w4a8 --out OUT, or at each start with engine.weights=w4a8"
)
# How plain weights are quantized when they are loaded, by the setting that asks for it.
AT_LOAD: Mapping[KeptWeights, Quantization] = {
    "fp8": Quantization(linear=Stored.FP8, experts=Stored.FP8),
    "w4a8": Quantization(linear=Stored.FP8, experts=Stored.INT4),
}
# How most such checkpoints are published; a checkpoint's tensors correct it.
INT4_EXPERTS = Quantization(linear=Stored.FP8, experts=Stored.INT4, static_inputs=True)
NVFP4_EXPERTS = Quantization(experts=Stored.NVFP4, nvfp4=frozenset({LinearKind.FEED_FORWARD}))


def parse_quantization(section: JsonReader | None) -> Quantization:
    """section: `quantization_config`. Raises CheckpointError naming what is not supported."""
    if section is None:
        return Quantization()
    method, block = section.text("quant_method"), section.text("weight_block_size")
    # Exporters of ModelOpt's checkpoints spell it either way.
    if method in ("modelopt", "modelopt_fp4") and section.text("quant_algo") == NVFP4_ALGORITHM:
        return NVFP4_EXPERTS
    if method in PACKED_METHODS:
        return PACKED_METHODS[method](section)
    whole_blocks = str([WEIGHT_BLOCK, WEIGHT_BLOCK])
    if method not in ("fp8", "w4afp8"):
        supported = "'fp8', 'w4afp8', 'modelopt' with quant_algo NVFP4, 'compressed-tensors', 'awq', 'gptq', or none"
        raise CheckpointError(f"quantization {method!r} is not supported: expected {supported}")
    if block != whole_blocks and not (method == "w4afp8" and block is None):
        raise CheckpointError(f"weight_block_size is {block}: expected {whole_blocks}")
    if (scale_form := section.text("scale_fmt")) not in (None, POWER_SCALES):
        raise CheckpointError(f"scale_fmt is {scale_form}: expected {POWER_SCALES!r}, or none")
    power_scales = scale_form == POWER_SCALES
    if method == "fp8":
        return Quantization(linear=Stored.FP8, experts=Stored.FP8, power_scales=power_scales)
    _check_group(section.count("group_size", WEIGHT_GROUP), "quantization_config.group_size")
    return replace(INT4_EXPERTS, power_scales=power_scales)


def _parse_compressed(section: JsonReader) -> Quantization:
    """INT4 in groups, as in Kimi-K2-Thinking: without zero points, and without a form for activations."""
    groups = section.section("config_groups")
    listed = [] if groups is None else groups.sections()
    weights = listed[0].section("weights") if len(listed) == 1 else None
    if section.text("format") != "pack-quantized" or weights is None:
        raise CheckpointError("compressed-tensors is supported as 'pack-quantized' with one group of layers")
    _check_values(listed[0], {"input_activations": None, "output_activations": None})
    served = {"num_bits": "4", "type": "int", "symmetric": "True", "strategy": "group", "actorder": None}
    _check_values(weights, served)
    if (size := weights.count("group_size")) not in COMPRESSED_GROUPS:
        raise CheckpointError(f"weights.group_size is {size}: compressed-tensors' INT4 is read in groups of 32 or 128")
    return Quantization(experts=Stored.INT4, group=size, compressed=True)


def _parse_awq(section: JsonReader) -> Quantization:
    _check_values(section, {"zero_point": "True"})
    if (version := section.text("version")) is not None and version.lower() != "gemm":
        raise CheckpointError(f"quantization_config.version is {version}: of AWQ's layouts only 'gemm' is read")
    _check_values(section, {"bits": "4"} if section.has("bits") else {"w_bit": "4"})
    return Quantization(linear=Stored.PACKED, experts=Stored.PACKED)


def _parse_gptq(section: JsonReader) -> Quantization:
    _check_values(section, {"bits": "4"})
    if section.flag("desc_act", False):
        raise CheckpointError(
            "quantization_config.desc_act is true: GPTQ's reordered groups are not read, only false is"
        )
    if (form := section.text("checkpoint_format")) not in (None, "gptq"):
        raise CheckpointError(f"quantization_config.checkpoint_format is {form}: of GPTQ's only 'gptq' is read")
    return Quantization(linear=Stored.PACKED, experts=Stored.PACKED)


# What other tools pack, by quant_method.
PACKED_METHODS: Mapping[str | None, Callable[[JsonReader], Quantization]] = MappingProxyType(
    {"compressed-tensors": _parse_compressed, "awq": _parse_awq, "gptq": _parse_gptq}
)


def _check_values(section: JsonReader, served: Mapping[str, str | None]) -> None:
    for key, expected in served.items():
        if (found := section.text(key)) != expected:
            raise CheckpointError(f"{section.path}{key} is {found}: only {expected or 'null'} is supported")


def read_quantization_files(model_dir: Path) -> Quantization:
    """TensorRT-LLM's `hf_quant_config.json` and `quant_cfg.json`, if they are there. Raises CheckpointError."""
    path = model_dir / "hf_quant_config.json"
    if not path.exists():
        return Quantization()
    settings = read_json(path).get("quantization")
    algorithm = settings.get("quant_algo") if isinstance(settings, dict) else None
    if algorithm == NVFP4_ALGORITHM:
        return NVFP4_EXPERTS
    if algorithm != "MIXED_PRECISION":
        raise CheckpointError(
            f"{path}: quant_algo {algorithm!r} is not supported: expected 'MIXED_PRECISION' or {NVFP4_ALGORITHM!r}"
        )
    layers_path = model_dir / "quant_cfg.json"
    layers = read_json(layers_path).get("quantized_layers")
    if not isinstance(layers, dict) or not layers:
        raise CheckpointError(f"{layers_path} has no quantized_layers")
    try:
        for name, layer in layers.items():
            _check_layer(name, layer if isinstance(layer, dict) else {})
    except CheckpointError as error:
        raise CheckpointError(f"{layers_path}: {error.message}") from error
    return INT4_EXPERTS


def _check_layer(name: str, layer: Mapping[str, Any]) -> None:
    expected = EXPERTS_ALGORITHM if ".mlp.experts" in name else LINEAR_ALGORITHM
    if layer.get("quant_algo") != expected:
        raise CheckpointError(
            f"{name} has quant_algo {layer.get('quant_algo')!r}: only {expected!r} is supported there"
        )
    if expected == EXPERTS_ALGORITHM:
        _check_group(layer.get("group_size", WEIGHT_GROUP), f"group_size of {name}")


def _check_group(size: object, name: str) -> None:
    if size != WEIGHT_GROUP:
        raise CheckpointError(f"{name} is {size}: INT4 weights come in groups of {WEIGHT_GROUP}")
