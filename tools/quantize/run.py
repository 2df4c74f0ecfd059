"""From a checkpoint to its quantized twin, one layer at a time."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from engine.model.quantization import Stored
from engine.weights.shards import open_shards
from kernels.group_quant import GROUP
from mesh.errors import CheckpointError, ConfigError
from tools.quantization_configs import FP8_CONFIG, W4A8_CONFIG
from tools.quantize.error import Error, total
from tools.quantize.output import Output, UnitReport
from tools.quantize.rounding import Format, is_expert, round_tensor
from tools.quantize.source import Source, Unit

CONFIGS: Mapping[Format, Mapping[str, Any]] = MappingProxyType({Format.FP8: FP8_CONFIG, Format.W4A8: W4A8_CONFIG})


@dataclass(frozen=True, slots=True)
class Options:
    model_dir: Path
    out: Path
    form: Format
    # On which weights are rounded.
    device: torch.device


def quantize(options: Options) -> list[UnitReport]:
    """Write the quantized checkpoint to `options.out`, or what an earlier run with the same options left to do.

    Holds one layer of the result in memory. Raises CheckpointError where the model cannot be quantized, ConfigError
    where the directory holds something else.
    """
    with open_shards(options.model_dir) as shards:
        source = Source(options.model_dir, shards, options.device)
        _check(source, options.form)
        settings = {"format": options.form.value, "source": source.fingerprint}
        output = Output(options.out, settings, [unit.name for unit in source.units])
        output.prepare()
        with _progress() as progress:
            task = progress.add_task("quantizing", total=len(source.units))
            reports = [_quantize_unit(source, unit, options.form, output, progress, task) for unit in source.units]
        config = dict(source.settings) | {"quantization_config": dict(CONFIGS[options.form])}
        output.complete(source.directory, config, reports)
    return reports


def choose_device(name: str) -> torch.device:
    """name: "auto", or a device. Raises ConfigError for a GPU where there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device {name!r}: choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, and torch finds no GPU")
    return torch.device(name)


def _check(source: Source, form: Format) -> None:
    stored, config = source.stored, source.config
    if stored.experts is Stored.INT4:
        raise CheckpointError(f"{source.directory} has INT4 experts already: quantize the model that it was made of")
    if form is Format.FP8 and stored.linear is Stored.FP8:
        raise CheckpointError(f"{source.directory} is in FP8 already")
    if form is Format.W4A8:
        for name in ("hidden_size", "moe_intermediate_size"):
            if getattr(config, name) % GROUP:
                raise CheckpointError(
                    f"{name} {getattr(config, name)} is not a multiple of {GROUP}, the width of INT4 groups"
                )


def _quantize_unit(
    source: Source, unit: Unit, form: Format, output: Output, progress: Progress, task: TaskID
) -> UnitReport:
    report = output.finished(unit.name)
    if report is None:
        report = _round_unit(source, unit, form, output)
    progress.advance(task)
    return report


def _round_unit(source: Source, unit: Unit, form: Format, output: Output) -> UnitReport:
    tensors: dict[str, torch.Tensor] = {}
    int4: list[Error] = []
    fp8: list[Error] = []
    for spec in unit.specs:
        rounded = round_tensor(source, spec, form)
        tensors |= rounded.tensors
        if rounded.error is not None:
            (int4 if form is Format.W4A8 and is_expert(spec.name) else fp8).append(rounded.error)
    report = UnitReport(
        name=unit.name,
        size_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        int4_error=total(int4).relative if int4 else None,
        fp8_error=total(fp8).relative if fp8 else None,
    )
    output.write(report, tensors)
    return report


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} layers"))
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not sys.stderr.isatty())
