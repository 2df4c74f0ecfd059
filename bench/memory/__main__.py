"""Memory that the mesh holds and that loading takes.

    python -m bench.memory

Serving: a mesh on the oracle backend answers a warm-up and then 10,000 requests, half over gRPC and half over HTTP,
each with a prompt of its own. The resident memory of every process is read after each 500. Everything that a service
keeps on purpose is bounded so tightly that it is full after the warm-up; growth afterwards is therefore a leak.

Loading: a process of its own loads a checkpoint of over 1 GB. Its highest resident memory during the load, less what
was resident once everything was imported, is compared with the size of the files. The checkpoint is bfloat16. Loaded as
float32, which is what "auto" means on a CPU, the weights alone are twice the files; that peak is compared with the
weights.
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from bench.memory.loading_peak import LoadingPeak
from bench.memory.serving_memory import MemoryCurve, serving_memory
from tools.make_checkpoint import make_checkpoint

MEGABYTE = 1 << 20
# Requests between two readings.
LOT = 500
MOST_RESIDENT_MB = 150
MOST_GROWTH_MB = 5
MOST_PEAK_RATIO = 1.2
# About 700M parameters.
LARGE: dict[str, object] = {
    "num_hidden_layers": 10,
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "n_routed_experts": 40,
}


@dataclass(frozen=True)
class LoadingRow:
    dtype: str
    file_bytes: int
    peak: LoadingPeak

    @property
    def taken_bytes(self) -> int:
        return self.peak.peak_bytes - self.peak.baseline_bytes

    @property
    def ratio(self) -> float:
        """The peak over what must be in memory: the files' size, or the weights' if their dtype makes them larger."""
        return self.taken_bytes / max(self.file_bytes, self.peak.parameter_bytes)


@dataclass(frozen=True)
class Report:
    warmup: int
    curve: MemoryCurve
    loading: list[LoadingRow]


def loading_rows(checkpoint: Path) -> list[LoadingRow]:
    """Load `checkpoint` in its own dtype and in the CPU's default. It is made first if it does not exist."""
    if not (checkpoint / "config.json").exists():
        make_checkpoint(checkpoint, "small", dtype="bfloat16", overrides=LARGE)
    file_bytes = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    return [LoadingRow(dtype, file_bytes, _loading_peak(checkpoint, dtype)) for dtype in ("bfloat16", "float32")]


def _loading_peak(checkpoint: Path, dtype: str) -> LoadingPeak:
    command = [sys.executable, "-m", "bench.memory.loading_peak", str(checkpoint), dtype]
    finished = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(finished.stdout, type=LoadingPeak)


def serving_table(curve: MemoryCurve, warmup: int) -> Table:
    requests = curve.requests[-1] - warmup
    table = Table(
        title=f"Resident MB over {requests:,} requests (targets: gateway and scheduler under {MOST_RESIDENT_MB}, "
        f"growth under {MOST_GROWTH_MB})",
        title_justify="left",
    )
    table.add_column("process")
    for column in ("at the start", f"after {warmup:,}", f"after {curve.requests[-1]:,}", "growth", "highest"):
        table.add_column(column, justify="right")
    warm = curve.requests.index(warmup)
    for name, sizes in curve.resident_bytes.items():
        values = (sizes[0], sizes[warm], sizes[-1], curve.growth_bytes(name, warmup), max(sizes))
        table.add_row(name, *(f"{size / MEGABYTE:.1f}" for size in values))
    return table


def loading_table(rows: list[LoadingRow]) -> Table:
    table = Table(title=f"Loading a bfloat16 checkpoint (target: ratio under {MOST_PEAK_RATIO})", title_justify="left")
    for column in ("as", "files MB", "weights MB", "peak MB", "peak to the larger"):
        table.add_column(column, justify="left" if column == "as" else "right")
    for row in rows:
        sizes = (row.file_bytes, row.peak.parameter_bytes, row.taken_bytes)
        table.add_row(row.dtype, *(f"{size / MEGABYTE:,.0f}" for size in sizes), f"{row.ratio:.3f}")
    return table


def save_plot(curve: MemoryCurve, warmup: int, path: Path) -> None:
    figure = Figure(figsize=(8, 4), dpi=130, layout="constrained")
    axes = figure.subplots()
    for name, sizes in curve.resident_bytes.items():
        axes.plot(curve.requests, [size / MEGABYTE for size in sizes], label=name, linewidth=1.6)
    axes.axvline(warmup, color="grey", linestyle="--", linewidth=1, label="end of the warm-up")
    axes.set(xlabel="requests", ylabel="resident MB", title="Resident memory of a mesh on the oracle backend")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of the mesh's processes, and of loading.")
    parser.add_argument("--requests", type=int, default=10_000, help=f"A multiple of {LOT}.")
    parser.add_argument("--warmup", type=int, default=1_000, help=f"A multiple of {LOT}.")
    parser.add_argument("--checkpoint", type=Path, default=Path("out/checkpoint-1g"), help="Made if it is not there.")
    parser.add_argument("--output", type=Path, default=Path("out/memory.json"))
    arguments = parser.parse_args()
    output: Path = arguments.output
    output.parent.mkdir(parents=True, exist_ok=True)
    curve = uvloop.run(serving_memory(output.with_suffix(".log"), arguments.requests, arguments.warmup, LOT))
    report = Report(arguments.warmup, curve, loading_rows(arguments.checkpoint))
    output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    save_plot(curve, arguments.warmup, output.with_suffix(".png"))
    console = Console(highlight=False)
    console.print(serving_table(curve, arguments.warmup))
    console.print(loading_table(report.loading))
    console.print(f"saved {output} and {output.with_suffix('.png')}")


if __name__ == "__main__":
    main()
