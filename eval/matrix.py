"""The configurations under which a model's quality is compared, and their evaluation one after the other."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec
from rich.console import Console

from eval.evaluation import evaluate
from eval.options import EvalOptions
from eval.perplexity import Document
from eval.quality_page import file_name
from eval.results import Result
from launcher.gpus import find_gpus
from mesh.errors import ConfigError


@dataclass(frozen=True)
class Configuration:
    """A column of the table: a form of the checkpoint, and settings of the mesh that serves it."""

    name: str
    checkpoint: str
    settings: tuple[str, ...] = ()
    # Whether only a GPU has kernels for it.
    on_gpus: bool = False


_BF16 = "decode.engine.dtype=bfloat16"
# Products use the weights as they are stored, by kernels on a GPU and by their references on a CPU. Activations are
# quantized too, except with NVFP4 weights.
_QUANTIZED = (_BF16, "decode.engine.weights=quantized")
_FP8_KV = "decode.engine.kv_dtype=float8_e4m3fn"
_FP8_PROMPTS = "decode.engine.prompt_attention_dtype=float8_e4m3fn"
# All others are compared with the first: the published weights in bfloat16 products. Add a line for a new technique.
CONFIGURATIONS = (
    Configuration("bf16", "fp8", (_BF16, "decode.engine.weights=dequantized")),
    Configuration("FP8", "fp8", _QUANTIZED),
    Configuration("FP8, FP8 KV", "fp8", (*_QUANTIZED, _FP8_KV)),
    Configuration("FP8, FP8 prompts", "fp8", (*_QUANTIZED, _FP8_PROMPTS), on_gpus=True),
    Configuration("FP8, FP8 KV, FP8 prompts", "fp8", (*_QUANTIZED, _FP8_KV, _FP8_PROMPTS), on_gpus=True),
    Configuration("W4A8 rounded", "w4a8", _QUANTIZED),
    Configuration("W4A8 AWQ", "w4a8-awq", _QUANTIZED),
    Configuration("W4A8 AWQ, FP8 KV", "w4a8-awq", (*_QUANTIZED, _FP8_KV)),
    Configuration("NVFP4", "nvfp4", _QUANTIZED),
    Configuration("NVFP4, FP8 queries", "nvfp4", (*_QUANTIZED, "decode.engine.query_weights=fp8")),
    Configuration("FP8, chosen tokens", "v32", _QUANTIZED),
)
# The default directory of each form of the checkpoint, and the quantizer's options for the forms that are not shipped.
CHECKPOINTS: Mapping[str, Path] = MappingProxyType(
    {
        "fp8": Path("models/tiny-r1"),
        "w4a8": Path("checkpoints/tiny-r1/w4a8"),
        "w4a8-awq": Path("checkpoints/tiny-r1/w4a8-awq"),
        "nvfp4": Path("checkpoints/tiny-r1/nvfp4"),
        # Trained further, with attention to the tokens that indexers choose.
        "v32": Path("models/tiny-v32"),
    }
)
_QUANTIZER_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "w4a8": "--format w4a8",
        "w4a8-awq": "--format w4a8 --awq --calibration tasks",
        "nvfp4": "--format nvfp4",
    }
)


def configurations(settings: Sequence[str], gpus: Sequence[object]) -> list[Configuration]:
    """Those that the mesh can compute. settings: of every mesh; gpus: of this machine."""
    on_gpus = bool(gpus) and "decode.engine.device=cpu" not in settings
    return [each for each in CONFIGURATIONS if on_gpus or not each.on_gpus]


def checkpoints(named: Sequence[str]) -> dict[str, Path]:
    """The directory of each form. named: other directories ("w4a8=DIR"). Raises ConfigError for an unknown or absent
    form.
    """
    found = dict(CHECKPOINTS)
    for each in named:
        form, separator, directory = each.partition("=")
        if form not in found or not separator:
            raise ConfigError(f"--checkpoint {each}: expected FORM=DIR, the form being {', '.join(found)}")
        found[form] = Path(directory)
    for form, path in found.items():
        if not (path / "config.json").exists():
            made = "".join(f", or make it: {command}" for command in preparation(found, [form]))
            raise ConfigError(f"no {form} checkpoint in {path}: name one with --checkpoint {form}=DIR{made}")
    return found


def preparation(forms: Mapping[str, Path], wanted: Iterable[str]) -> list[str]:
    """The commands that make the wanted forms from the shipped checkpoint."""
    made = [(form, _QUANTIZER_OPTIONS[form]) for form in wanted if form in _QUANTIZER_OPTIONS]
    return [f"deepmesh quantize {forms['fp8']} {options} --out {forms[form]}" for form, options in made]


async def evaluate_matrix(
    options: EvalOptions, forms: Mapping[str, Path], documents: Sequence[Document], console: Console
) -> list[Result]:
    """Evaluate each configuration in turn, each in a folder of its own under the options' directory."""
    found = []
    for configuration in configurations(options.settings, find_gpus()):
        console.rule(configuration.name)
        own = {
            "model_dir": forms[configuration.checkpoint],
            "settings": (*configuration.settings, *options.settings),
            "out": options.directory / file_name(configuration.name),
        }
        result = await evaluate(options.model_copy(update=own), documents, console)
        found.append(msgspec.structs.replace(result, name=configuration.name))
    return found
