"""Prompts and tokens on the same GPUs or on different ones: simulated goodput over the rate.

`python -m bench.fleet.goodput`. Each comparison uses the same number of engines (one a GPU) twice: without prefill
workers, and with half of them for prompts. Times are those of the cost model that `deepmesh plan` uses: measured on
one H200 with an eighth of DeepSeek-R1's experts, and for other shares of the experts or fewer layers scaled by the
floors of bytes and FLOPs. Two things are left out: communication between GPUs, and that ranks of one worker step
together. The latter favours the cases in which GPUs compute both prompts and tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from matplotlib.figure import Figure

from capacity.plan import Asked, Plan, plan
from capacity.shapes import DEEPSEEK_R1
from engine.model.config import ModelConfig, parse_model_config
from engine.model.quantization import Stored
from loadgen.summary import Objectives
from mesh.blocks import BLOCK_TOKENS
from mesh.config_values import validate
from mesh.cost_file import save_costs
from sim.fleet import FleetConfig
from sim.run import simulate
from sim.workload import WorkloadConfig

PROMPT, OUTPUT = 3500, 1000
TTFT_MS = 2000.0
# Bounds for the model with all its layers: 20 and 25 tokens a second for each user.
TPOT_MS = (50.0, 40.0)
# Seconds of arrivals that count. Requests arrive for as long before and do not count, because the fleet begins empty.
SECONDS = 60.0
STEP_TOKENS = 4096
COLOURS = ("#2563eb", "#d97706", "#059669")


@dataclass(frozen=True)
class Engines:
    """`replicas` GPUs of one role. Each group of `shared_by` GPUs holds all of a model's experts."""

    replicas: int
    shared_by: int


@dataclass(frozen=True)
class Case:
    """One model on some GPUs. `prefill` is None where each GPU computes prompts and tokens."""

    name: str
    model: ModelConfig
    kv_item_bytes: int
    decode: Engines
    prefill: Engines | None = None


@dataclass(frozen=True)
class Comparison:
    """The first case is the one without prefill workers."""

    title: str
    rates: tuple[float, ...]
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Row:
    """`kept` requests a minute met both bounds."""

    case: str
    tpot_ms: float
    rate: float
    share: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float

    @property
    def kept(self) -> float:
        return 60 * self.rate * self.share


def comparisons() -> tuple[Comparison, ...]:
    r1 = parse_model_config(dict(DEEPSEEK_R1))
    int4 = replace(r1, quantization=replace(r1.quantization, experts=Stored.INT4))
    cut = replace(r1, num_hidden_layers=20)
    return (
        Comparison(
            "Eight H200 of one host, DeepSeek-R1, INT4 experts, FP8 KV",
            (6.0, 8.0, 10.0, 12.0),
            (
                Case("without prefill workers", int4, 1, Engines(8, 8)),
                Case("4 for prompts, 4 for tokens", int4, 1, Engines(4, 4), Engines(4, 4)),
            ),
        ),
        Comparison(
            "Eight H200 (half of two hosts where split), DeepSeek-R1, FP8",
            (6.0, 8.0, 10.0, 12.0),
            (
                Case("without prefill workers", r1, 2, Engines(8, 8)),
                Case("4 for prompts, 4 for tokens", r1, 2, Engines(4, 8), Engines(4, 8)),
            ),
        ),
        Comparison(
            "Four H200, 20 layers of DeepSeek-R1, FP8",
            (2.0, 4.0, 6.0, 8.0),
            (
                Case("without prefill workers", cut, 2, Engines(4, 4)),
                Case("2 for prompts, 2 for tokens", cut, 2, Engines(2, 2), Engines(2, 2)),
            ),
        ),
    )


def measure(case: Case, rate: float, tpot_ms: float, seconds: float) -> Row:
    """Simulate one point. tpot_ms: the bound for all 61 layers; with fewer layers it shrinks in proportion."""
    bound = tpot_ms * case.model.num_hidden_layers / DEEPSEEK_R1["num_hidden_layers"]
    values = {
        "arrivals": {"per_second": rate},
        "seconds": 2 * seconds,
        "warm_up_seconds": seconds,
        "prompt": {"mean": PROMPT, "kind": "lognormal", "spread": 0.5},
        "output": {"mean": OUTPUT, "kind": "lognormal", "spread": 0.5, "most": 4000},
        "max_tokens": 4000,
    }
    with TemporaryDirectory() as folder:
        fleet = fleet_of(case, bound, Path(folder))
        summary = simulate(fleet, validate(WorkloadConfig, values, "workload"), Objectives(TTFT_MS, bound)).summary
    assert summary.ttft_ms is not None and summary.tpot_ms is not None
    ttft, tpot = summary.ttft_ms, summary.tpot_ms
    return Row(case.name, tpot_ms, rate, summary.goodput.share, ttft.p50, ttft.p99, tpot.p50, tpot.p99)


def fleet_of(case: Case, tpot_ms: float, folder: Path) -> FleetConfig:
    decode = _planned(case, case.decode)
    groups = {"decode": _group(case.decode, decode, folder / "decode.json")}
    if case.prefill is not None:
        groups["prefill"] = _group(case.prefill, _planned(case, case.prefill), folder / "prefill.json")
        groups["decode"]["can_prefill"] = False
    return validate(
        FleetConfig,
        {
            "costs": folder / "decode.json",
            "block_bytes": decode.kv_token_bytes * BLOCK_TOKENS,
            "layers": case.model.num_hidden_layers,
            "scheduler": {"objectives": {"ttft_ms": TTFT_MS, "tpot_ms": tpot_ms}},
            **groups,
        },
        "fleet",
    )


@cache
def _planned(case: Case, engines: Engines) -> Plan:
    found = plan(case.model, Asked("h200", engines.shared_by, PROMPT, OUTPUT, None, case.kv_item_bytes))
    assert found.fits, f"{case.name}: the model does not fit {engines.shared_by} GPUs"
    return found


def _group(engines: Engines, planned: Plan, costs: Path) -> dict[str, object]:
    save_costs(planned.costs, costs)
    return {
        "replicas": engines.replicas,
        "total_blocks": planned.kv_tokens // BLOCK_TOKENS,
        "max_requests": min(planned.requests, 256),
        "max_step_tokens": STEP_TOKENS,
        "costs": costs,
    }


def lines(compared: Comparison, rows: Sequence[Row]) -> Iterator[str]:
    """A table in Markdown."""
    yield f"{compared.title}:\n"
    yield "| GPUs | requests/min | kept 20 tokens/s | 25 tokens/s | TTFT p50, p99, ms | TPOT p50, p99, ms |"
    yield "|---|---|---|---|---|---|"
    for case in compared.cases:
        for rate in compared.rates:
            slower, quicker = (_row(rows, case.name, bound, rate) for bound in TPOT_MS)
            yield (
                f"| {case.name} | {60 * rate:.0f} | {slower.kept:.0f} | {quicker.kept:.0f} "
                f"| {slower.ttft_p50_ms:,.0f}, {slower.ttft_p99_ms:,.0f} "
                f"| {slower.tpot_p50_ms:.1f}, {slower.tpot_p99_ms:.1f} |"
            )
    for bound in TPOT_MS:
        most = [max(_row(rows, case.name, bound, rate).kept for rate in compared.rates) for case in compared.cases]
        gain = most[1] / most[0] - 1
        yield f"\nMost at {1000 / bound:.0f} tokens/s: {most[0]:.0f} a minute, split {most[1]:.0f} ({gain:+.0%})."


def _row(rows: Sequence[Row], case: str, bound: float, rate: float) -> Row:
    return next(row for row in rows if (row.case, row.tpot_ms, row.rate) == (case, bound, rate))


def draw(found: Sequence[tuple[Comparison, Sequence[Row]]], path: Path) -> None:
    picture = Figure(figsize=(5 * len(found), 4), dpi=130, layout="constrained")
    for axes, (compared, rows) in zip(picture.subplots(1, len(found)), found, strict=True):
        axes.set_title(
            compared.title.replace(", DeepSeek", ",\nDeepSeek").replace(", 20", ",\n20"), fontsize=9, loc="left"
        )
        axes.set_xlabel("requests/min offered")
        axes.set_ylabel("requests/min within 2 s and the bound (simulated)")
        offered = [60 * rate for rate in compared.rates]
        axes.plot(offered, offered, color="#6b7280", linewidth=1, linestyle=":")
        for case, colour in zip(compared.cases, COLOURS, strict=False):
            for bound, style in zip(TPOT_MS, ("-", "--"), strict=True):
                kept = [_row(rows, case.name, bound, rate).kept for rate in compared.rates]
                label = f"{case.name}, {1000 / bound:.0f} tokens/s"
                axes.plot(offered, kept, style, marker="o", markersize=4, color=colour, label=label)
        axes.set_ylim(bottom=0)
        axes.grid(color="#6b7280", alpha=0.18)
        axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, metadata={"Software": None})


def main(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the picture.")] = Path("out/goodput.png"),
    seconds: Annotated[
        float,
        typer.Option(metavar="S", help="How long counted requests arrive in each simulation, after as long a warm-up."),
    ] = SECONDS,
) -> None:
    """Compare GPUs that all compute prompts and tokens with the same GPUs divided in halves, one for prompts and one
    for tokens. No GPU is needed: times are predicted from measurements on one H200, without the communication between
    GPUs. For each comparison a table is printed, and a picture drawn, of how many requests kept their bounds at each
    rate: 2 s to the first token, and 20 or 25 tokens a second.
    """
    found = []
    for compared in comparisons():
        points = [(case, rate, bound) for case in compared.cases for rate in compared.rates for bound in TPOT_MS]
        rows = [measure(*point, seconds) for point in points]
        found.append((compared, rows))
        for line in lines(compared, rows):
            typer.echo(line)
        typer.echo("")
    draw(found, out)
    typer.echo(f"{out}")


if __name__ == "__main__":
    typer.run(main)
