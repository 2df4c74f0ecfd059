"""The highest rate at which requests keep their objectives, such as a token every 50 ms."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from loadgen.options import MOST_REQUESTS, LoadOptions
from loadgen.report import Report
from loadgen.summary import Distribution

# The lowest rate known to be too high is at most this many times the rate found.
PRECISION = 1.1
MOST_TRIALS = 16
# Fewest requests of a trial: with fewer, one late answer would decide.
FEWEST_REQUESTS = 30


@dataclass(frozen=True)
class Found:
    """trials: in the order in which they ran. best: the trial at the highest rate that kept the objectives, or the last
    trial if none did.
    """

    trials: list[Report]
    best: Report


def next_rate(tried: Sequence[tuple[float, bool]], first: float, precision: float = PRECISION) -> float | None:
    """The rate to try next: doubled while objectives are kept, halved while they are not, then between the two.

    tried: rates, and whether objectives were kept at them. precision: see PRECISION. None if the highest rate is known,
    or after MOST_TRIALS.
    """
    kept = [rate for rate, good in tried if good]
    missed = [rate for rate, good in tried if not good]
    if not tried:
        return first
    if len(tried) >= MOST_TRIALS:
        return None
    if not kept:
        return min(missed) / 2
    low = max(kept)
    above = [rate for rate in missed if rate > low]
    if not above:
        return 2 * low
    return math.sqrt(low * min(above)) if min(above) > precision * low else None


def find_rate(options: LoadOptions, run: Callable[[LoadOptions], Report]) -> Found:
    """Run one load after another, each with arrivals and prompts of its own, until the rate is known.

    It ends early if a run was stopped, if no request was answered, or if the next run would have too many requests.
    """
    assert options.duration_s is not None
    trials: list[Report] = []
    while (rate := next_rate([(each.options.rate, _is_kept(each)) for each in trials], options.rate)) is not None:
        duration_s = max(options.duration_s, FEWEST_REQUESTS / rate)
        if rate * duration_s > MOST_REQUESTS:
            break
        trial = {"rate": rate, "duration_s": duration_s, "seed": options.seed + len(trials)}
        trials.append(run(options.model_copy(update=trial)))
        if trials[-1].interrupted or not trials[-1].summary.completed:
            break
    kept = [trial for trial in trials if _is_kept(trial)]
    return Found(trials, max(kept, key=lambda trial: trial.options.rate) if kept else trials[-1])


def table(found: Found) -> Table:
    """A row for each rate, from the lowest."""
    options = found.best.options
    title = f"rates of requests, of which {options.good_share:.0%} are to be good; times in ms"
    rows = Table(title=title, title_justify="left")
    headings = ("a second", "done a minute", "good", "TTFT p50", "p99", "TPOT p50", "p99", "")
    for heading in headings:
        rows.add_column(heading, justify="right")
    for trial in sorted(found.trials, key=lambda trial: trial.options.rate):
        summary = trial.summary
        verdict = "kept" if _is_kept(trial) else "missed"
        rows.add_row(
            f"{trial.options.rate:.2f}", f"{summary.requests_per_minute:.1f}", f"{summary.goodput.share:.1%}",
            *_cells(summary.ttft_ms), *_cells(summary.tpot_ms), "stopped" if trial.interrupted else verdict,
        )  # fmt: skip
    return rows


def line(found: Found) -> str:
    """The result in one line: requests a minute, the objectives, and the time of whole answers over their tokens."""
    options, summary = found.best.options, found.best.summary
    bounds = ((options.ttft_slo_ms, "the first token in {:g} ms"), (options.tpot_slo_ms, "one every {:g} ms"))
    objectives = ", ".join(text.format(bound) for bound, text in bounds if bound is not None)
    if not _is_kept(found.best):
        why = "stopped" if found.best.interrupted else f"{options.rate:.3g} requests a second are too many"
        return f"no rate found ({objectives}): {why}"
    whole = summary.answer_per_token_ms
    normalized = "" if whole is None else f"; whole answers take {whole.p90:.1f} ms a token at p90"
    return f"{60 * options.rate:.1f} requests a minute ({objectives}: {summary.goodput.share:.1%}){normalized}"


def _is_kept(trial: Report) -> bool:
    return not trial.interrupted and trial.summary.goodput.share >= trial.options.good_share


def _cells(values: Distribution | None) -> tuple[str, str]:
    return ("-", "-") if values is None else (f"{values.p50:.1f}", f"{values.p99:.1f}")
