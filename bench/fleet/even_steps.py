"""What even steps bring one rank: the same requests, simulated with steps that take whole prompts and with even ones.

`python -m bench.fleet.even_steps [--lengths 1000/300 3500/1000 4000/300] [--shares 0.5 0.8] [--seconds 60]
[--streams 16 64 256] [--running N] [--costs FILE] [--requests 256] [--step-tokens 8192]`

Whole prompts are simulated with the steps captured that are so by default, and with those of a light model
(engine.prompt_graph_tokens), as even steps are. Times are those of a cost file, by default of Moonlight's shape on one
H200, which takes 256 requests and steps of 8,192 tokens. Requests of equal lengths arrive at shares of saturation: the
highest rate at which 99% are good with whole prompts, which is found first. Good is a first token in 2 s and the others
every 50 ms. The first third of the seconds does not count.

--streams are requests that come at once, after --running answers have begun.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import msgspec
import typer

import bench.rank
from bench.meshes.http_peers import Lengths
from capacity.shapes import MOONLIGHT
from engine.config import EngineConfig
from engine.memory.weight_bytes import BF16
from engine.model.config import parse_model_config
from engine.pace.mixed_steps import FEWEST_CAPTURED
from engine.pace.tails import most_rows
from loadgen.options import SEARCH_TPOT_MS, SEARCH_TTFT_MS
from loadgen.summary import Objectives
from loadgen.traces import TraceRow
from mesh.blocks import BLOCK_TOKENS
from mesh.config_values import validate
from sim.fleet import FleetConfig
from sim.result import Result
from sim.run import simulate
from sim.workload import WorkloadConfig

COSTS = Path(bench.rank.__file__).with_name("measured") / "moonlight.json"
GOOD_SHARE = 0.99
# Saturation is found to within this factor.
PRECISION = 1.03
# Answers run for this long before streams come; they have short prompts, and twice as many tokens.
RUNNING_SECONDS, RUNNING_PROMPT = 2.0, 500
OBJECTIVES = Objectives(SEARCH_TTFT_MS, SEARCH_TPOT_MS)


@dataclass(frozen=True)
class Form:
    """What is compared. captured: tokens of the largest captured step with prompts; mixed_step_ms: as engine's."""

    name: str
    captured: int
    mixed_step_ms: Literal["auto"] | None


USUAL = Form("whole", EngineConfig.model_fields["prompt_graph_tokens"].default, None)
FORMS = (USUAL, Form("whole, captured", FEWEST_CAPTURED, None), Form("even, captured", FEWEST_CAPTURED, "auto"))


@dataclass(frozen=True)
class Rank:
    """One rank that computes prompts and answers. costs: its cost file."""

    costs: Path
    max_requests: int
    max_step_tokens: int

    def fleet(self, form: Form, every_token: bool) -> FleetConfig:
        """Every request finds its blocks: memory is no limit."""
        model = parse_model_config(dict(MOONLIGHT))
        most_tokens = model.max_position_embeddings
        decode = {
            "replicas": 1,
            "max_requests": self.max_requests,
            "max_step_tokens": self.max_step_tokens,
            "captured_rows": most_rows(self.max_requests, self.max_step_tokens),
            "captured_prompt_tokens": form.captured,
            "total_blocks": self.max_requests * (most_tokens // BLOCK_TOKENS + 2),
            "mixed_step_ms": form.mixed_step_ms,
        }
        return validate(
            FleetConfig,
            {
                "costs": self.costs,
                "layers": model.num_hidden_layers,
                "block_bytes": BLOCK_TOKENS * model.kv_token_bytes(BF16),
                "context_tokens": most_tokens,
                "every_token": every_token,
                "decode": decode,
            },
            "fleet",
        )


def ran(rank: Rank, lengths: Lengths, rate: float, seconds: float, form: Form, every_token: bool = True) -> Result:
    """rate: arrivals a second, by Poisson's law."""
    workload = {
        "arrivals": {"per_second": rate},
        "seconds": seconds,
        "warm_up_seconds": seconds / 3,
        "prompt": {"mean": lengths.prompt},
        "output": {"mean": lengths.answer},
        "max_tokens": lengths.answer,
    }
    return simulate(rank.fleet(form, every_token), validate(WorkloadConfig, workload, "workload"), OBJECTIVES)


def at_once(rank: Rank, lengths: Lengths, streams: int, form: Form, running: int = 0) -> Result:
    """Requests that all come at once, next to `running` answers, which count too."""
    begun = [TraceRow(0.0, RUNNING_PROMPT, 2 * lengths.answer)] * running
    rows = begun + [TraceRow(1000 * RUNNING_SECONDS * bool(running), lengths.prompt, lengths.answer)] * streams
    with TemporaryDirectory() as scratch:
        trace = Path(scratch) / "requests.jsonl"
        trace.write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
        workload = validate(WorkloadConfig, {"trace": trace}, "workload")
        return simulate(rank.fleet(form, every_token=True), workload, OBJECTIVES)


def saturation(rank: Rank, lengths: Lengths, seconds: float) -> float:
    """The highest rate at which nearly all requests are good with whole prompts, captured as usual."""

    def good(rate: float) -> bool:
        return ran(rank, lengths, rate, seconds, USUAL, every_token=False).summary.goodput.share >= GOOD_SHARE

    low = 1.0
    while not good(low):
        low /= 2
    high = 2 * low
    while good(high):
        low, high = high, 2 * high
    while high > PRECISION * low:
        middle = sqrt(low * high)
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def row(lengths: Lengths, share: float, rate: float, form: Form, result: Result) -> str:
    """A row of a table in Markdown."""
    done = result.summary
    ttft, tpot, itl = done.ttft_ms, done.tpot_ms, done.itl_ms
    assert ttft is not None and tpot is not None and itl is not None and result.predictions is not None
    return (
        f"| {lengths} | {share:g} ({rate:.3g}) | {form.name} | {itl.p50:.1f}, {itl.p99:.1f} "
        f"| {itl.p99 / itl.p50:.2f} | {ttft.p50:,.0f}, {ttft.p99:,.0f} | {tpot.p50:.1f} | {done.goodput.share:.1%} "
        f"| {result.predictions.ttft_within_20_percent:.0%} |"
    )


def stream_rows(rank: Rank, lengths: Sequence[Lengths], streams: Sequence[int], running: int) -> Iterator[str]:
    yield f"| tokens | streams next to {running} answers | steps | tokens/s | ITL p50, p99, ms | TTFT p50, p99, ms |"
    yield "|---" * 6 + "|"
    for each in lengths:
        for number in streams:
            for form in FORMS[1:]:
                done = at_once(rank, each, number, form, running).summary
                itl, ttft = done.itl_ms, done.ttft_ms
                assert itl is not None and ttft is not None
                yield (
                    f"| {each} | {number} | {form.name} | {done.output_tokens_per_second:,.0f} "
                    f"| {itl.p50:.1f}, {itl.p99:.1f} | {ttft.p50:,.0f}, {ttft.p99:,.0f} |"
                )


def rows(rank: Rank, lengths: Sequence[Lengths], shares: Sequence[float], seconds: float) -> Iterator[str]:
    yield (
        "| tokens | of saturation (requests/s) | steps | ITL p50, p99, ms | p99 over p50 | TTFT p50, p99, ms "
        "| TPOT p50, ms | good | TTFT within 20% of placement's |"
    )
    yield "|---" * 9 + "|"
    for each in lengths:
        highest = saturation(rank, each, seconds)
        for share in shares:
            for form in FORMS:
                yield row(each, share, share * highest, form, ran(rank, each, share * highest, seconds, form))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [Lengths(1000, 300), Lengths(3500, 1000), Lengths(4000, 300)]
    parser.add_argument("--lengths", type=Lengths.parse, nargs="+", default=default, metavar="PROMPT/ANSWER")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.5, 0.8], help="of saturation")
    parser.add_argument("--streams", type=int, nargs="+", default=[], help="requests that come at once")
    parser.add_argument("--running", type=int, default=0, help="answers that run when streams come")
    parser.add_argument("--seconds", type=float, default=60.0, help="for which requests arrive at each rate")
    parser.add_argument("--costs", type=Path, default=COSTS, help="a cost file (deepmesh calibrate)")
    parser.add_argument("--requests", type=int, default=256, help="that run at once")
    parser.add_argument("--step-tokens", type=int, default=8192, help="of a step at most")
    given = parser.parse_args()
    rank = Rank(given.costs, given.requests, given.step_tokens)
    for line in rows(rank, given.lengths, given.shares, given.seconds) if given.shares else ():
        typer.echo(line)
    for line in stream_rows(rank, given.lengths, given.streams, given.running) if given.streams else ():
        typer.echo(line)


if __name__ == "__main__":
    main()
