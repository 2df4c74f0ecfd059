"""What the gateway costs, compared with the least that could stand in its place: a bare grpc.aio relay of its tokens.

    python -m bench.gateway_relay

Saturation: 256 Generate streams read as fast as they come, through a gateway whose decode worker writes the next token
of every request in each frame, and through the relay from a source of single tokens, both without pace. Tokens a
second, counted at the client over the same time.

Added latency: 64 streams get one token each in every step of 50 ms, through the gateway of a whole mesh on the oracle
backend. A token's latency counts from its step. The source writes the time of a step into its messages. The engine does
not; therefore a second client, attached straight to the decode worker with a request in the same batch, sees the steps
come (`step_clock.py`). It sees them one hop late; that hop is measured on one stream straight from the source and
added. The latency of 64 direct streams from the source is subtracted from both.

Fairness. All paths speak the same messages over one connection to the same client code. The relay parses nothing, and
its source makes nothing: both are as cheap as grpc.aio allows. The process under test has the first core for itself;
everything else, the client included, has the others. Direct, relay and gateway take turns within each repeat, and
medians over repeats are compared. The table says how busy each process was: a gateway or relay well below one core was
not saturated but starved by the rest.

The gateway puts tokens that wait for one client into one message; the relay forwards messages as they are. Messages a
second are printed next to tokens a second for that reason.

The same gateway is then read over HTTP, as server-sent events with a connection for each stream. So is a gateway of
several processes, whose tokens and processor time are summed over them.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from bench.gateway_relay.measurements import Saturation, StepLatency, saturation, step_latency
from bench.gateway_relay.paths import paced_paths, saturated_paths

LEAST_THROUGHPUT_RATIO = 0.5
MOST_ADDED_RATIO = 2.0


@dataclass(frozen=True)
class Options:
    streams: int
    paced_streams: int
    pace_ms: float
    # Seconds that each measurement takes.
    seconds: float
    repeats: int
    # Processes of a second gateway; 1 if there is no second gateway.
    processes: int


@dataclass(frozen=True)
class Verdict:
    """Ratios of gateway to relay, from medians over the repeats. `added` is p99 less the direct path's p99.

    If other work on the machine disturbs the direct path as much as the relay, `added` means nothing: then look at the
    ratio of whole latencies.
    """

    throughput_ratio: float
    message_ratio: float
    # Ratio of tokens per second of processor time, which other work on the machine disturbs least.
    per_core_ratio: float
    relay_added_ms: float
    gateway_added_ms: float
    # None if the relay added nothing.
    added_ratio: float | None
    latency_ratio: float


@dataclass(frozen=True)
class Report:
    """Measurements by path, one for each repeat."""

    options: Options
    saturation: dict[str, list[Saturation]]
    latency: dict[str, list[StepLatency]]
    verdict: Verdict


async def run(options: Options, log: Path, console: Console) -> Report:
    """Both halves, one after the other, each with processes of its own."""
    saturations: dict[str, list[Saturation]] = {}
    async with saturated_paths(log, options.processes) as paths:
        for repeat in range(options.repeats):
            for path in paths:
                each = await saturation(path, options.streams, options.seconds)
                saturations.setdefault(path.name, []).append(each)
                console.print(f"saturation {repeat + 1}, {path.name}: {each.tokens_per_second:,.0f} tokens/s")
    latencies: dict[str, list[StepLatency]] = {}
    async with paced_paths(log, options.paced_streams, options.pace_ms) as paths:
        for repeat in range(options.repeats):
            hop = await step_latency(paths[0], 1, options.seconds)
            for path in paths:
                paced = await step_latency(path, options.paced_streams, options.seconds, hop.latency_ms.p50)
                latencies.setdefault(path.name, []).append(paced)
                console.print(f"latency {repeat + 1}, {path.name}: p99 {paced.latency_ms.p99:.2f} ms")
    return Report(options, saturations, latencies, judge(saturations, latencies))


def judge(saturations: Mapping[str, Sequence[Saturation]], latencies: Mapping[str, Sequence[StepLatency]]) -> Verdict:
    """Medians first, then differences and ratios of them."""
    tokens = {name: median(each.tokens_per_second for each in of) for name, of in saturations.items()}
    messages = {name: median(each.messages_per_second for each in of) for name, of in saturations.items()}
    per_core = {name: _per_core(of) for name, of in saturations.items()}
    p99 = {name: median(each.latency_ms.p99 for each in of) for name, of in latencies.items()}
    relay_added, gateway_added = p99["relay"] - p99["direct"], p99["gateway"] - p99["direct"]
    return Verdict(
        throughput_ratio=tokens["gateway"] / tokens["relay"],
        message_ratio=messages["gateway"] / messages["relay"],
        per_core_ratio=per_core["gateway"] / per_core["relay"],
        relay_added_ms=relay_added,
        gateway_added_ms=gateway_added,
        added_ratio=gateway_added / relay_added if relay_added > 0 else None,
        latency_ratio=p99["gateway"] / p99["relay"],
    )


def throughput_table(report: Report) -> Table:
    verdict = report.verdict
    title = (
        f"{report.options.streams} streams, no pace: gateway at {verdict.throughput_ratio:.2f} of the relay's tokens/s "
        f"(target {LEAST_THROUGHPUT_RATIO} at least), {verdict.message_ratio:.2f} of its messages/s, "
        f"{verdict.per_core_ratio:.2f} of its tokens per second of processor time"
    )
    table = _table(title, "tokens/s", "messages/s", "tokens/core-s")
    for name, repeats in report.saturation.items():
        tokens = median(each.tokens_per_second for each in repeats)
        messages = median(each.messages_per_second for each in repeats)
        per_core = _per_core(repeats)
        cores = _cores(each.cores for each in repeats)
        table.add_row(name, f"{tokens:,.0f}", f"{messages:,.0f}", f"{per_core:,.0f}", cores)
    return table


def latency_table(report: Report) -> Table:
    options, verdict = report.options, report.verdict
    ratio = "no measure" if verdict.added_ratio is None else f"{verdict.added_ratio:.2f} times"
    title = (
        f"{options.paced_streams} streams, a token every {options.pace_ms:g} ms: p99 added by the gateway "
        f"{verdict.gateway_added_ms:.2f} ms, by the relay {verdict.relay_added_ms:.2f} ms: {ratio} "
        f"(target {MOST_ADDED_RATIO:g} at most); whole p99 {verdict.latency_ratio:.2f} times the relay's"
    )
    table = _table(title, "p50 ms", "p99 ms")
    for name, repeats in report.latency.items():
        p50 = median(each.latency_ms.p50 for each in repeats)
        p99 = median(each.latency_ms.p99 for each in repeats)
        table.add_row(name, f"{p50:.2f}", f"{p99:.2f}", _cores(each.cores for each in repeats))
    return table


def _per_core(repeats: Iterable[Saturation]) -> float:
    return median(each.tokens_per_core_second for each in repeats)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("path")
    for column in columns:
        table.add_column(column, justify="right")
    table.add_column("cores in use")
    return table


def _cores(repeats: Iterable[Mapping[str, float]]) -> str:
    every = list(repeats)
    return ", ".join(f"{name} {median(cores[name] for cores in every):.2f}" for name in every[0])


def main() -> None:
    parser = argparse.ArgumentParser(description="The gateway against a bare grpc.aio relay.")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--paced-streams", type=int, default=64)
    parser.add_argument("--pace-ms", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=4.0, help="Of each measurement.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2, help="Of a second gateway, over several connections.")
    parser.add_argument("--output", type=Path, default=Path("out/gateway-relay.json"))
    arguments = vars(parser.parse_args())
    output: Path = arguments.pop("output")
    output.parent.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    report = uvloop.run(run(Options(**arguments), output.with_suffix(".log"), console))
    output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    console.print(throughput_table(report))
    console.print(latency_table(report))
    console.print(f"saved {output}")


if __name__ == "__main__":
    main()
