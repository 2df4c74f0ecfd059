"""`deepmesh quantize`, layer by layer."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.quantize.host_memory import host_peak
from engine.weights.fingerprint import weights_fingerprint
from engine.weights.shards import open_shards
from tools.quantize.calibration import Calibration
from tools.quantize.forms import Format
from tools.quantize.output import UnitReport
from tools.quantize.run import Options, quantize


@dataclass(frozen=True)
class Layer:
    """Time and memory of one layer, or of "rest": embedding, last norm and head. The device's peak is that of this
    layer alone, the host's is the peak so far.
    """

    report: UnitReport
    source_bytes: int
    seconds: float
    device_peak_bytes: int
    host_peak_bytes: int

    @property
    def rate(self) -> float:
        """Bytes of the source a second."""
        return self.source_bytes / self.seconds


def fingerprint_seconds(model: Path) -> float:
    """Seconds of reading all weights for their fingerprint. The quantizer keeps it next to them, so that later runs
    need not.
    """
    started = time.perf_counter()
    weights_fingerprint(model)
    return time.perf_counter() - started


def quantize_layers(
    model: Path,
    out: Path,
    device: torch.device,
    calibration: Calibration | None,
    *,
    awq: bool,
    done: Callable[[Layer], None],
) -> list[Layer]:
    """done: called after each layer."""
    sizes = unit_bytes(model)
    layers: list[Layer] = []
    cuda = device.type == "cuda"
    with host_peak() as peak:
        last = time.perf_counter()

        def note(report: UnitReport) -> None:
            nonlocal last
            now = time.perf_counter()
            highest = torch.cuda.max_memory_allocated() if cuda else 0
            layers.append(Layer(report, sizes[report.name], now - last, highest, peak.peak_bytes))
            done(layers[-1])
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            last = now

        if cuda:
            torch.cuda.reset_peak_memory_stats()
        quantize(Options(model, out, Format.W4A8, device, calibration=calibration, awq=awq), note)
    return layers


def unit_bytes(model: Path) -> dict[str, int]:
    """Bytes of each layer of a checkpoint by its number, and of "rest"."""
    sizes: dict[str, int] = {}
    with open_shards(model) as shards:
        for name, entry in shards.entries.items():
            parts = name.split(".")
            unit = parts[2] if parts[1] == "layers" else "rest"
            sizes[unit] = sizes.get(unit, 0) + entry.size_bytes
    return sizes
