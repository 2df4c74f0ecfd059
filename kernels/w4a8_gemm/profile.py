"""The fastest tilings of a product, measured on the card when weights are loaded and kept on disk."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from kernels.cache_files import cache_folder, package_version, read_cached, write_cached
from kernels.moe_permute.layout import MaskedLayout
from kernels.w4a8_gemm.operands import Int4Experts, ScaledRows
from kernels.w4a8_gemm.tiling import TILINGS, Tiling, TilingTable

# Expected rows at which tilings are compared, and how often each is timed.
ROWS = (4, 8, 12, 16, 20, 24, 32)
REPEATS = 7
# Exponents of Zipf's law, by which tokens choose experts: evenly, and very unevenly.
EXPONENTS = (0.0, 1.0)
CHOICES = 8

# Seconds that a tiling takes for an expected number of rows.
Measure = Callable[[int, Tiling], float]


def profiled(weight: Int4Experts, folder: Path | None = None) -> Int4Experts:
    """`weight` with the fastest tilings on its card.

    They are measured, for about two seconds, if `folder` (by default deepmesh in the user's cache) has none of this
    shape, card and package version. Weights that the product on Hopper does not take stay as they are.
    """
    if not weight.tiles.is_cuda:
        return weight
    from kernels.w4a8_gemm import warpgroups

    if not warpgroups.takes(weight):
        return weight
    file = (folder or cache_folder()) / f"w4a8-{_key(weight.tiles.device, warpgroups.FOLDER)}.json"
    shape = f"{'x'.join(map(str, weight.shape))} in {weight.group}"
    table = find_or_measure(file, shape, lambda *case: _measure(weight, *case))
    return replace(weight, tilings=table)


def find_or_measure(file: Path, shape: str, measure: Measure) -> TilingTable:
    """The shape's table in the file; if it has none, a new one, which is added to it."""
    tables = read_cached(file)
    if shape not in tables:
        tables[shape] = list(measure_table(measure).most_rows)
        write_cached(file, tables)
    return TilingTable(tuple(tables[shape]))


def measure_table(measure: Measure) -> TilingTable:
    """The fastest tiling at each of `ROWS`; between two of them, the one for more rows."""
    fastest = [_fastest(rows, measure) for rows in ROWS]
    # Noise must not give more rows a smaller tile.
    fastest = [max(fastest[: index + 1]) for index in range(len(fastest))]
    most = [max((rows for rows, best in zip(ROWS, fastest, strict=True) if best <= at), default=0) for at in _ALL]
    return TilingTable(tuple(most[:-1]))


_ALL = range(len(TILINGS))


def _fastest(rows: int, measure: Measure) -> int:
    """Index of the fastest tiling. Tiles of less than half of the rows never are it, and are not tried."""
    sensible = [at for at in _ALL if rows <= 2 * TILINGS[at].rows]
    return min(sensible, key=lambda at: measure(rows, TILINGS[at]))


def _measure(weight: Int4Experts, rows: int, tiling: Tiling) -> float:
    """Median seconds of all loads together, whose tokens are the same ones for every tiling."""
    return sum(_measure_load(weight, rows, tiling, exponent) for exponent in EXPONENTS)


def _measure_load(weight: Int4Experts, rows: int, tiling: Tiling, exponent: float) -> float:
    from kernels.w4a8_gemm import warpgroups

    experts, _, inputs = weight.shape
    device, choices = weight.tiles.device, min(CHOICES, experts)
    tokens = -(-rows * experts // choices)
    generator = torch.Generator(device).manual_seed(rows)
    # The largest of such sums are a draw without replacement by popularity (Gumbel's trick).
    popularity = torch.arange(1, experts + 1, device=device).float() ** -exponent
    gumbel = -torch.empty(tokens, experts, device=device).exponential_(generator=generator).log()
    chosen = (popularity.log() + gumbel).topk(choices, dim=1).indices
    counts = torch.bincount(chosen.flatten(), minlength=experts).int()
    layout = MaskedLayout(chosen, counts, -(-int(counts.max()) // 64) * 64)
    values = torch.randn(*layout.shape, inputs, device=device, generator=generator).to(torch.float8_e4m3fn)
    x = ScaledRows(values, torch.ones(experts, device=device), static=True)
    return _median_seconds(lambda: warpgroups.w4a8_grouped_gemm(x, weight, layout, tiling))


def _median_seconds(call: Callable[[], object]) -> float:
    # The first call compiles.
    call()
    return median(_seconds(call) for _ in range(REPEATS))


def _seconds(call: Callable[[], object]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # A second launch hides the first one's overhead on the host.
    call()
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1000


def _key(device: torch.device, sources: Path) -> str:
    """Made of the package's version, the sources and the card."""
    card = torch.cuda.get_device_properties(device)
    told: Sequence[bytes] = [
        f"{package_version()} {card.name} {card.multi_processor_count}".encode(),
        *(path.read_bytes() for path in sorted(sources.iterdir())),
    ]
    return hashlib.sha256(b"\0".join(told)).hexdigest()[:16]
