"""The times of routed layers, by provider, as a table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.table import Table

OURS, INT4, MEGA = "ours FP8", "ours INT4", "mega_moe FP8"
PROVIDERS = (OURS, INT4, MEGA)
ABSENT = "-"
# Both providers round the inner activations to FP8, each with scales of its own. A larger difference means that one of
# them is wrong.
LARGEST_ERROR = 0.08


@dataclass(frozen=True)
class Row:
    ranks: int
    experts_a_rank: int
    # Tokens of each rank.
    tokens: int
    # Seconds of a layer, by provider. mega_moe is missing if it failed.
    seconds: dict[str, float]
    # Floors by provider, of FP8 and of INT4 weights.
    floors: dict[str, float]
    # Error of mega_moe's sums relative to ours.
    error: float | None
    # Why mega_moe is missing; None if it is not, or if it was not asked for.
    failure: str | None


def merged(by_rank: Sequence[Sequence[Row]]) -> list[Row]:
    """The cases with the times of the slowest rank and the largest error of any rank."""
    return [_merged(rows) for rows in zip(*by_rank, strict=True)]


def _merged(rows: Sequence[Row]) -> Row:
    first = rows[0]
    seconds = {name: max(row.seconds[name] for row in rows) for name in first.seconds}
    errors = [row.error for row in rows if row.error is not None]
    return replace(first, seconds=seconds, error=max(errors, default=None))


def line(row: Row) -> str:
    """One rank's figures as text, shown while others still measure."""
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
    # NaN counts as wrong too, because it is not below the bound.
    return f"{error:.2%}" if error <= LARGEST_ERROR else f"{error:.2%} WRONG"
