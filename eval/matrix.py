"""The configurations that a model's quality is compared under, and their evaluation one after the other."""

from collections.abc import Mapping, Sequence
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
from mesh.errors import ConfigError


@dataclass(frozen=True)
class Configuration:
    """A column: a form of the checkpoint, and settings of the mesh that serves it."""

    name: str
    checkpoint: str
    settings: tuple[str, ...] = ()


# A new technique is one more line. The others are compared with the first.
CONFIGURATIONS = (
    Configuration("bf16", "bf16"),
    Configuration("FP8 weights", "fp8"),
    Configuration("FP8 weights, FP8 KV", "fp8", ("decode.engine.kv_dtype=float8_e4m3fn",)),
)
# Where each form lies unless told otherwise. Only FP8 is shipped; training writes both.
CHECKPOINTS: Mapping[str, Path] = MappingProxyType(
    {"fp8": Path("models/tiny-r1"), "bf16": Path("checkpoints/tiny-r1/bf16")}
)


def checkpoints(named: Sequence[str]) -> dict[str, Path]:
    """The known forms with `named` ("bf16=DIR") in their place. Raises ConfigError for an unknown or absent one."""
    found = dict(CHECKPOINTS)
    for each in named:
        form, separator, directory = each.partition("=")
        if form not in found or not separator:
            raise ConfigError(f"--checkpoint {each}: expected FORM=DIR, the form being {', '.join(found)}")
        found[form] = Path(directory)
    for form, path in found.items():
        if not (path / "config.json").exists():
            raise ConfigError(f"no {form} checkpoint in {path}: name one with --checkpoint {form}=DIR")
    return found


async def evaluate_matrix(
    options: EvalOptions, forms: Mapping[str, Path], documents: Sequence[Document], console: Console
) -> list[Result]:
    """One result a configuration, in their order; each in a folder of its own under the options' directory."""
    found = []
    for configuration in CONFIGURATIONS:
        console.rule(configuration.name)
        own = {
            "model_dir": forms[configuration.checkpoint],
            "settings": (*configuration.settings, *options.settings),
            "out": options.directory / file_name(configuration.name),
        }
        result = await evaluate(options.model_copy(update=own), documents, console)
        found.append(msgspec.structs.replace(result, name=configuration.name))
    return found
