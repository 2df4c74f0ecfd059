"""The stages that are measured, each in a process of its own, which prints its results as they come."""

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console

from bench.quantize.loading import evict, load, plain_rate, reader_rate, shard_files
from bench.quantize.quantizing import Layer, fingerprint_seconds, quantize_layers, unit_bytes
from bench.quantize.source import write_source
from capacity.shapes import DEEPSEEK_R1
from tools.make_checkpoint import checkpoint_config
from tools.quantize.calibration import TASKS, Calibration, read_calibration

GB = 1e9
# A shape with layers of 20 MB, for a machine without a GPU.
SMALL = checkpoint_config(
    "tiny",
    dtype="float8",
    overrides={
        "hidden_size": 512,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "moe_intermediate_size": 256,
        "n_routed_experts": 48,
        "num_nextn_predict_layers": 0,
    },
)
SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType({"r1": DEEPSEEK_R1, "small": SMALL})


@dataclass(frozen=True)
class Options:
    shape: str
    layers: int
    # How many of the layers, the first ones, have no experts.
    dense: int
    directory: Path
    device: str
    # Texts for calibration, and the most tokens of each.
    sequences: int
    tokens: int

    @property
    def source(self) -> Path:
        return self.directory / "fp8"

    @property
    def rounded(self) -> Path:
        return self.directory / "w4a8"

    @property
    def scaled(self) -> Path:
        return self.directory / "w4a8-static"

    @property
    def searched(self) -> Path:
        return self.directory / "w4a8-awq"


def make_source(options: Options) -> None:
    changes = {"num_hidden_layers": options.layers, "first_k_dense_replace": options.dense}
    options.source.mkdir(parents=True)
    started = time.perf_counter()
    size = write_source(options.source, dict(SHAPES[options.shape]) | changes, _device(options))
    seconds, count = time.perf_counter() - started, len(shard_files(options.source))
    _say(f"source: {size / GB:.2f} GB in {count} shards, written in {seconds:.1f} s ({size / seconds / GB:.2f} GB/s)")


def quantize_plainly(options: Options) -> list[Layer]:
    seconds = fingerprint_seconds(options.source)
    _say(f"fingerprint of the source: {seconds:.1f} s")
    return _quantize(options, options.rounded, None, awq=False)


def quantize_with_static_scales(options: Options) -> list[Layer]:
    return _quantize(options, options.scaled, _calibration(options), awq=False)


def quantize_with_awq(options: Options) -> list[Layer]:
    return _quantize(options, options.searched, _calibration(options), awq=True)


def load_plain(options: Options) -> float:
    return _load(options, options.rounded)


def load_with_awq(options: Options) -> float:
    return _load(options, options.searched)


def load_from_disk(options: Options) -> float:
    """Load the result of AWQ after evicting it from the page cache. Returns the load's rate over a plain read's."""
    directory = options.searched
    evict(shard_files(directory))
    plain = plain_rate(shard_files(directory))
    _say(f"{directory.name} from disk: plain read {plain / GB:.2f} GB/s")
    evict(shard_files(directory))
    return _say_loaded(options, directory, "from disk", plain)


def _calibration(options: Options) -> Calibration:
    calibration = read_calibration(TASKS, options.source, sequences=options.sequences, tokens=options.tokens)
    _say(f"calibration: {calibration.tokens:,} tokens")
    return calibration


def _quantize(options: Options, out: Path, calibration: Calibration | None, *, awq: bool) -> list[Layer]:
    # The unit is the last layer, which has experts.
    layer_bytes = unit_bytes(options.source)[str(options.layers - 1)]
    shard_bytes = max(path.stat().st_size for path in shard_files(options.source))

    def say(layer: Layer) -> None:
        report = layer.report
        errors = [
            f"{name} {error:.2%}"
            for name, error in (("INT4", report.int4_error), ("outputs", report.output_error))
            if error is not None
        ]
        _say(
            f"{out.name} {report.name}: {layer.source_bytes / GB:.2f} GB in {layer.seconds:.2f} s"
            f" ({layer.rate / GB:.2f} GB/s); peak: device {layer.device_peak_bytes / layer_bytes:.3f} layers,"
            f" host {layer.host_peak_bytes / layer_bytes:.3f} layers or {layer.host_peak_bytes / shard_bytes:.2f}"
            f" shards; {', '.join(errors)}"
        )

    return quantize_layers(options.source, out, _device(options), calibration, awq=awq, done=say)


def _load(options: Options, directory: Path) -> float:
    """Load a checkpoint from the page cache. Returns the load's rate over a plain read's."""
    # The first read brings the files into the page cache.
    plain_rate(shard_files(directory))
    plain, ahead = plain_rate(shard_files(directory)), reader_rate(directory, _device(options))
    _say(f"{directory.name} from memory: plain read {plain / GB:.2f} GB/s, read to the device {ahead / GB:.2f} GB/s")
    # The first load also loads kernels.
    _say_loaded(options, directory, "from memory, first", plain)
    return _say_loaded(options, directory, "from memory, again", plain)


def _say_loaded(options: Options, directory: Path, how: str, plain: float) -> float:
    shard_bytes = max(path.stat().st_size for path in shard_files(options.source))
    found = load(directory, _device(options))
    _say(
        f"{directory.name} {how}: loaded in {found.seconds:.2f} s ({found.rate / GB:.2f} GB/s, {found.rate / plain:.2f}"
        f" of a plain read); peak on the host {found.host_peak_bytes / shard_bytes:.3f} shards"
    )
    return found.rate / plain


def remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


def _device(options: Options) -> torch.device:
    return torch.device(options.device)


def _say(line: str) -> None:
    Console(highlight=False, soft_wrap=True).print(line)
