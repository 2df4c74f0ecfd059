"""Quantizes a checkpoint, one layer at a time."""

import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from engine.model.quantization import Stored
from engine.weights.shards import open_shards
from kernels.group_quant import GROUP
from kernels.nvfp4_quant import GROUP as NVFP4_GROUP
from mesh.errors import CheckpointError, ConfigError
from tools.quantize.calibration import Calibration
from tools.quantize.error import Error, total
from tools.quantize.experts import QuantizedExperts, quantize_experts
from tools.quantize.forms import Format, LayerSet, Target, is_expert
from tools.quantize.layer_pass import LayerPass, Routed
from tools.quantize.output import Output, UnitReport
from tools.quantize.rounding import round_tensors
from tools.quantize.source import Source, Unit

# The file with the calibration texts' residual between two layers, from which a later run goes on.
STATE = "calibration_state.bin"


@dataclass(frozen=True, slots=True)
class Options:
    model_dir: Path
    out: Path
    form: Format
    # The device on which weights are rounded.
    device: torch.device
    # Texts from which the experts' inputs get static scales. Without them, each row gets a scale of its own.
    calibration: Calibration | None = None
    # Search for scales of the experts' input channels; needs calibration.
    awq: bool = False
    # The layers that become NVFP4; None for all that can. Other formats offer no choice.
    layers: frozenset[LayerSet] | None = None

    @property
    def target(self) -> Target:
        return Target(self.form) if self.layers is None else Target(self.form, self.layers)


def _nothing(report: UnitReport) -> None:
    """The default of `done`, for callers that need only the final list of reports."""


def quantize(options: Options, done: Callable[[UnitReport], None] = _nothing) -> list[UnitReport]:
    """Write the quantized checkpoint to `options.out`. It completes an earlier run with the same options.

    done: called after each layer. One layer of the result is on the device at a time. Raises CheckpointError if the
    model cannot be quantized, ConfigError if the directory holds something else or options do not go together.
    """
    _check_options(options)
    with open_shards(options.model_dir) as shards:
        source = Source(options.model_dir, shards, options.device)
        _check_source(source, options.target)
        output = Output(options.out, _settings(source, options), [unit.name for unit in source.units])
        output.prepare()
        run = _Run(source, output, options)
        with _progress() as progress:
            reports = []
            for unit in progress.track(source.units, description="quantizing"):
                reports.append(run.quantize(unit))
                done(reports[-1])
        specs = [spec for unit in source.units for spec in unit.specs]
        written = options.target.config(specs, power_scales=source.stored.power_scales)
        config = dict(source.settings) | {"quantization_config": written}
        output.complete(source.directory, config, reports)
        (options.out / STATE).unlink(missing_ok=True)
    return reports


def choose_device(name: str) -> torch.device:
    """name: "auto", or a device. Raises ConfigError for a GPU if there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device {name!r}: choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, and torch finds no GPU")
    return torch.device(name)


def _check_options(options: Options) -> None:
    if options.awq and options.calibration is None:
        raise ConfigError("AWQ needs calibration: name a file, or tasks")
    if options.calibration is not None and options.form is not Format.W4A8:
        raise ConfigError(f"calibration is of INT4 experts: {options.form.value} has none")
    if options.layers is not None and options.form is not Format.NVFP4:
        raise ConfigError(f"a choice of layers is for nvfp4: {options.form.value} is for all of them")


def _check_source(source: Source, target: Target) -> None:
    if target.form is Format.FP8 and source.stored.linear is Stored.FP8:
        raise CheckpointError(f"{source.directory} is in FP8 already")
    if target.form is Format.W4A8:
        for name in ("hidden_size", "moe_intermediate_size"):
            width = getattr(source.config, name)
            if width % GROUP:
                raise CheckpointError(f"{name} {width} is not a multiple of {GROUP}, the width of INT4 groups")
    for spec in (spec for unit in source.units for spec in unit.specs):
        if target.stored(spec) is Stored.NVFP4 and spec.shape[1] % NVFP4_GROUP:
            raise CheckpointError(
                f"{spec.name} has {spec.shape[1]} inputs, not a multiple of {NVFP4_GROUP}, the width of NVFP4 groups"
            )


def _settings(source: Source, options: Options) -> dict[str, str]:
    """The settings that decide every byte of the result."""
    settings = {"format": options.form.value, "source": source.fingerprint}
    if options.calibration is not None:
        settings |= {"calibration": options.calibration.digest, "awq": str(options.awq)}
    if options.form is Format.NVFP4:
        settings["layers"] = ",".join(sorted(each.value for each in options.target.layers))
    return settings


class _Run:
    """Quantizes one unit after the other."""

    def __init__(self, source: Source, output: Output, options: Options) -> None:
        self._source, self._output, self._options = source, output, options
        self._pass = None
        if options.calibration is not None:
            self._pass = LayerPass(source, options.calibration, options.out / STATE)

    def quantize(self, unit: Unit) -> UnitReport:
        report = self._output.finished(unit.name)
        experts = None
        if self._pass is not None and unit.layer is not None and self._pass.next_layer <= unit.layer:
            # Compute the layer even if its unit is finished, because later layers need its outputs for the texts.
            experts = self._run_layer(self._pass)
        if report is None:
            report = self._write(unit, experts)
        if experts is not None and self._pass is not None:
            self._pass.save()
        return report

    def _run_layer(self, layer_pass: LayerPass) -> QuantizedExperts | None:
        prefix = f"model.layers.{layer_pass.next_layer}.mlp"
        quantized: QuantizedExperts | None = None

        def compute(routed: Routed) -> torch.Tensor:
            nonlocal quantized
            quantized = quantize_experts(self._source, prefix, routed, awq=self._options.awq)
            return quantized.added

        layer_pass.run_layer(compute)
        return quantized

    def _write(self, unit: Unit, experts: QuantizedExperts | None) -> UnitReport:
        tensors: dict[str, torch.Tensor] = {}
        errors: dict[Stored, list[Error]] = defaultdict(list)
        if experts is not None:
            tensors |= experts.tensors
            errors[Stored.INT4].append(experts.weight_error)
        others = [spec for spec in unit.specs if experts is None or not is_expert(spec.name)]
        for rounded in round_tensors(self._source, others, self._options.target):
            tensors |= rounded.tensors
            if rounded.error is not None:
                errors[rounded.form].append(rounded.error)

        def relative(form: Stored) -> float | None:
            return total(errors[form]).relative if errors[form] else None

        report = UnitReport(
            name=unit.name,
            size_bytes=sum(tensor.nbytes for tensor in tensors.values()),
            int4_error=relative(Stored.INT4),
            fp8_error=relative(Stored.FP8),
            nvfp4_error=relative(Stored.NVFP4),
            output_error=experts.output_error.relative if experts is not None else None,
        )
        self._output.write(report, tensors)
        return report


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} layers"))
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not sys.stderr.isatty())
