"""Times every kernel and the packages that are installed at the shapes of DeepSeek-R1, in one run.

`python -m bench.kernels [OPERATION ...] [--json FILE]`: an operation is a module of this package with `cases()`.
"""

import argparse
import json
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import bench.kernels
from bench.kernels.timing import Case, time_case
from bench.rank.ceilings import measure_ceilings
from capacity.ceilings import Ceilings

INFRASTRUCTURE = {"__main__", "deepseek_r1", "inputs", "prompt_peers", "score_peers", "selected_peers", "timing"}


@dataclass(frozen=True)
class Result:
    operation: str
    shape: str
    provider: str
    microseconds: float
    terabytes_per_second: float
    teraflops: float
    # The floor's time divided by the time taken.
    share_of_ceiling: float


def operations() -> list[str]:
    names = {module.name for module in pkgutil.iter_modules(bench.kernels.__path__)}
    return sorted(names - INFRASTRUCTURE)


def measure(names: Iterable[str], ceilings: Ceilings) -> Iterator[Result]:
    for name in names:
        cases: Callable[[], Iterable[Case]] = import_module(f"bench.kernels.{name}").cases
        for case in cases():
            yield _result(name, case, time_case(case), ceilings)


def _result(operation: str, case: Case, seconds: float, ceilings: Ceilings) -> Result:
    return Result(
        operation=operation,
        shape=case.shape,
        provider=case.provider,
        microseconds=seconds * 1e6,
        terabytes_per_second=case.size_bytes / seconds / 1e12,
        teraflops=case.flops / seconds / 1e12,
        share_of_ceiling=ceilings.seconds(case.size_bytes, case.flops, fp8=case.fp8) / seconds,
    )


def table(results: Sequence[Result]) -> Table:
    shown = Table(title="kernels: medians of graph replays, inputs rotated")
    for column in ("operation", "shape", "provider", "us", "TB/s", "TFLOP/s", "of the ceiling"):
        shown.add_column(column, justify="left" if column in ("operation", "shape", "provider") else "right")
    for result in results:
        shown.add_row(
            result.operation,
            result.shape,
            result.provider,
            f"{result.microseconds:.1f}",
            f"{result.terabytes_per_second:.2f}",
            f"{result.teraflops:.0f}" if result.teraflops else "",
            f"{result.share_of_ceiling:.2f}",
        )
    return shown


def main() -> int:
    known = operations()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*", default=known, help=f"of {', '.join(known)}; by default all")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    if unknown := set(arguments.operations) - set(known):
        parser.error(f"no operation is called {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    if not torch.cuda.is_available():
        parser.error("kernels are timed on a CUDA device, and there is none here")
    ceilings = measure_ceilings(torch.device("cuda"))
    results = list(measure(arguments.operations, ceilings))
    console = Console(width=130)
    console.print(table(results))
    console.print(f"ceilings: {ceilings}")
    if arguments.json is not None:
        figures = {"ceilings": asdict(ceilings), "results": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
