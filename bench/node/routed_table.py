"""What routed layers took, by provider, as a table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.table import Table

OURS, INT4, MEGA = "ours FP8", "ours INT4", "mega_moe FP8"
PROVIDERS = (OURS, INT4, MEGA)
ABSENT = "-"
# Both round the inner activations to FP8, each with scales of its own: further apart, one of them is wrong.
LARGEST_ERROR = 0.08


@dataclass(frozen=True)
class Row:
    ranks: int
    experts_a_rank: int
    # Each rank has so many.
    tokens: int
    # By provider, what a layer takes; mega_moe is not there if it failed.
    seconds: dict[str, float]
    # By provider, of FP8 and INT4 weights.
    floors: dict[str, float]
    # How far mega_moe's sums are from ours, relative to these.
    error: float | None
    # Why mega_moe is not there; None too if it was not asked for.
    failure: str | None


def merged(by_rank: Sequence[Sequence[Row]]) -> list[Row]:
    """Each case as its slowest rank has it, with the largest error."""
    return [_merged(rows) for rows in zip(*by_rank, strict=True)]


def _merged(rows: Sequence[Row]) -> Row:
    first = rows[0]
    seconds = {name: max(row.seconds[name] for row in rows) for name in first.seconds}
    errors = [row.error for row in rows if row.error is not None]
    return replace(first, seconds=seconds, error=max(errors, default=None))


def line(row: Row) -> str:
    """What one rank measured, shown while the others still measure."""
    times = ", ".join(f"{name} {1e6 * seconds:.1f} us" for name, seconds in row.seconds.items())
    return f"{row.experts_a_rank} experts and {row.tokens} tokens a rank: {times}; mega_moe's error {_error(row.error)}"


def table(rows: Sequence[Row], card: str) -> Table:
    title = f"A routed layer of DeepSeek-R1's shape over {rows[0].ranks} {card}, us in a graph, on the slowest rank"
    shown = Table(title=title)
    names = (*PROVIDERS, "FP8/mega", "INT4/mega", "FP8 floor", "INT4 floor", "FP8/floor", "INT4/floor", "mega error")
    for column in ("experts a rank", "tokens a rank", *names):
        shown.add_column(column, justify="right")
    for row in rows:
        times = [row.seconds.get(name) for name in PROVIDERS]
        floors = [row.floors[OURS], row.floors[INT4]]
        ratios = [_ratio(row.seconds[name], row.seconds.get(MEGA)) for name in (OURS, INT4)]
        above = [_ratio(row.seconds[name], row.floors[name]) for name in (OURS, INT4)]
        cells = [*map(_microseconds, times), *ratios, *map(_microseconds, floors), *above, _error(row.error)]
        shown.add_row(str(row.experts_a_rank), str(row.tokens), *cells)
    return shown


def _microseconds(seconds: float | None) -> str:
    return ABSENT if seconds is None else f"{1e6 * seconds:.1f}"


def _ratio(seconds: float, other: float | None) -> str:
    return ABSENT if other is None else f"{seconds / other:.2f}"


def _error(error: float | None) -> str:
    if error is None:
        return ABSENT
    # Not a number is not below it either.
    return f"{error:.2%}" if error <= LARGEST_ERROR else f"{error:.2%} WRONG"
