"""Loads a checkpoint and prints the memory that took, as one JSON object.

`python -m bench.memory.loading_peak DIR DTYPE` runs it in a process of its own. Everything that loading imports is
imported before the baseline is read, so that the difference is due to the weights alone.
"""

import sys
from pathlib import Path

import msgspec
import torch

from engine.weights.loading import load_model


class LoadingPeak(msgspec.Struct, frozen=True):
    # Resident bytes of the process before it loads, and their peak while it loads.
    baseline_bytes: int
    peak_bytes: int
    # Bytes of the model in memory.
    parameter_bytes: int


def measure(directory: Path, dtype: torch.dtype) -> LoadingPeak:
    # Reset the peak of resident memory (proc(5), clear_refs).
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    baseline = _status_bytes("VmRSS")
    model = load_model(directory, dtype, torch.device("cpu"))
    peak = _status_bytes("VmHWM")
    return LoadingPeak(baseline, peak, sum(each.place.nbytes for each in model.parameters()))


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (kilobytes,) = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(kilobytes) * 1024


if __name__ == "__main__":
    measured = measure(Path(sys.argv[1]), getattr(torch, sys.argv[2]))
    sys.stdout.write(msgspec.json.encode(measured).decode() + "\n")
