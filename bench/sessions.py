"""Sessions over a KV pool that holds a tenth of them: the time to first token with evicted blocks in host memory, and
without.

    python -m bench.sessions [--sessions 20] [--turns 8] [--pairs 2] [--shape moonlight [--layers N] [--experts bf16]]
    [--objective-ms MS ...] [--ways W] [--tries N]

A mesh of one decode worker serves the shipped model, or random weights of a published shape. Each pair starts it twice,
in alternating order, and sends it the same sessions, as `deepmesh bench --dataset sessions` does.

With --objective-ms each mesh is sent sessions at one rate after another, new ones each time, until the highest rate is
known at which GOOD_SHARE of all first tokens keep the first objective. --tries bounds how many rates are tried. Of each
rate the table has the share of first tokens that keep each objective.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop
from rich.console import Console
from rich.table import Table

from bench.meshes.model_mesh import ModelMesh, model_mesh
from bench.meshes.random_model import write_random_model
from capacity.calibration.workers import workers_of
from capacity.shapes import EXPERTS, SHAPES
from loadgen.options import SESSIONS, LoadOptions
from loadgen.run import load
from loadgen.search import MOST_TRIALS, next_rate
from loadgen.summary import Distribution, Objectives, Summary, summarize
from mesh.blocks import blocks_for
from mesh.rpc.channel import Channels

ANSWER_TOKENS, TURN_TOKENS = 16, 48
POOL_PART = 10
# The lowest rate known to be too high is at most this many times the rate found.
PRECISION = 1.5
GOOD_SHARE = 0.95
# A trial has no fewer: one late answer would decide.
FEWEST_SESSIONS = 6
# With host memory, and without.
WAYS = ("without", "with")
# A machine may page-lock memory slowly.
LOCKING_SECONDS = 120.0
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Options:
    sessions: int
    turns: int
    prompt_tokens: int
    rate: float
    think_seconds: float
    pairs: int
    shape: str | None
    # None: those of the shape.
    layers: int | None
    # As in `capacity.shapes.EXPERTS`.
    experts: str
    # The first one is searched for.
    objective_ms: Sequence[float]
    # Sessions begin for so long at each rate that is tried.
    seconds: float
    # Some of WAYS.
    ways: Sequence[str]
    # The most rates that are tried.
    tries: int

    @property
    def session_blocks(self) -> int:
        """Blocks of a session at its end."""
        return blocks_for(self.prompt_tokens + self.turns * (ANSWER_TOKENS + TURN_TOKENS))

    @property
    def pool_blocks(self) -> int:
        return max(self.sessions * self.session_blocks // POOL_PART, 2 * self.session_blocks)

    def host_blocks(self, way: str) -> int:
        return 2 * self.sessions * self.session_blocks if way == "with" else 0


@dataclass(frozen=True)
class Trial:
    rate: float
    summary: Summary
    # The share of first tokens in time, by objective.
    in_time: Sequence[float]

    def keeps(self, objective: int) -> bool:
        return self.in_time[objective] >= GOOD_SHARE


async def run(options: Options, host_blocks: int, seed: int, log: Path, model_dir: Path | None) -> AsyncIterator[Trial]:
    """model_dir: a model without weights, or None for the shipped one."""
    settings = [f"decode.engine.total_blocks={options.pool_blocks}", f"decode.engine.host_blocks={host_blocks}"]
    if model_dir is not None:
        settings.append("decode.engine.random_weights=true")
    async with model_mesh(log, model_dir=model_dir, settings=settings) as mesh:
        await _until_there(mesh, host_blocks)
        if not options.objective_ms:
            yield await _trial(mesh.gateway, options, options.rate, options.sessions, seed)
            return
        tried: list[tuple[float, bool]] = []
        while len(tried) < options.tries and (rate := next_rate(tried, options.rate, PRECISION)) is not None:
            sessions = max(round(rate * options.seconds), FEWEST_SESSIONS)
            trial = await _trial(mesh.gateway, options, rate, sessions, seed + 1000 * len(tried))
            tried.append((rate, trial.keeps(0)))
            yield trial


async def _until_there(mesh: ModelMesh, host_blocks: int) -> None:
    """Return once the worker has this much host memory. Raises TimeoutError."""
    channels, one = Channels(), LoadOptions(grpc=mesh.gateway, requests=1, isl=1, osl=1, warmup=0)
    async with asyncio.timeout(LOCKING_SECONDS):
        while True:
            # A worker tells of it after a step.
            await load(one)
            (worker,) = await workers_of(mesh.scheduler, channels)
            if worker.load.host_tier.total_blocks >= host_blocks:
                return
            await asyncio.sleep(_LOOK_SECONDS)


async def _trial(gateway: str, options: Options, rate: float, sessions: int, seed: int) -> Trial:
    asked = LoadOptions(
        grpc=gateway,
        dataset=SESSIONS,
        requests=sessions,
        rate=rate,
        isl=options.prompt_tokens,
        osl=ANSWER_TOKENS,
        turns=options.turns,
        turn_tokens=TURN_TOKENS,
        think_s=options.think_seconds,
        # Nothing is shared: each session is found again by itself alone.
        prefixes=0,
        seed=seed,
    )
    report = await load(asked)
    in_time = [summarize(report.records, Objectives(each, None)).goodput.share for each in options.objective_ms]
    return Trial(rate, report.summary, in_time)


def _row(name: str, trial: Trial) -> Sequence[str]:
    summary = trial.summary
    later = next((each for each in summary.by_turn if each.turns.startswith("later")), None)
    times = [_ms(summary.ttft_ms, "p50"), _ms(summary.ttft_ms, "p99")]
    if later is None:
        times += ["-", "-", "-"]
    else:
        cached = (later.cached_tokens or 0) / later.input_tokens
        times += [_ms(later.ttft_ms, "p50"), _ms(later.ttft_ms, "p99"), f"{cached:.0%}"]
    rates = [f"{summary.requests_per_minute:.1f}", str(summary.completed)]
    return [name, f"{trial.rate:.2f}", *times, *rates, *(f"{share:.0%}" for share in trial.in_time)]


def _most(trials: Sequence[Trial], objective: int) -> float:
    """The highest of these rates that kept the objective, or 0."""
    return max((trial.rate for trial in trials if trial.keeps(objective)), default=0.0)


def _ms(times: Distribution | None, name: str) -> str:
    return "-" if times is None else f"{getattr(times, name):,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="TTFT of sessions with and without KV in host memory.")
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=640, help="of a session's first request")
    parser.add_argument("--rate", type=float, default=0.2, help="sessions a second")
    parser.add_argument("--think-seconds", type=float, default=5.0)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--layers", type=int, help="by default those of the shape")
    parser.add_argument("--experts", choices=sorted(EXPERTS), default="bf16", help="of the shape")
    objectives = "find the highest rate with the first token in so long; of further ones say which rates kept them"
    parser.add_argument("--objective-ms", type=float, nargs="+", default=(), metavar="MS", help=objectives)
    parser.add_argument("--seconds", type=float, default=10.0, help="for which sessions begin at each rate tried")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS, help="whether with host memory")
    parser.add_argument("--tries", type=int, default=MOST_TRIALS, help="the most rates that are tried")
    options, console = Options(**vars(parser.parse_args())), Console(width=140)
    table = Table(
        title=f"{options.sessions} sessions of {options.turns} turns, {options.session_blocks} blocks each at the end;"
        f" a pool of {options.pool_blocks} blocks",
        title_justify="left",
    )
    headings = ("", "a second", "TTFT p50", "p99", "later turns p50", "p99, ms", "cached")
    for heading in (*headings, "requests/min", "answered", *(f"in {each:g} ms" for each in options.objective_ms)):
        table.add_column(heading, justify="right")
    found: dict[str, list[Trial]] = {way: [] for way in options.ways}

    async def collect(way: str, pair: int, directory: Path, model_dir: Path | None) -> None:
        async for trial in run(options, options.host_blocks(way), pair, directory / "log", model_dir):
            found[way].append(trial)
            table.add_row(*_row(way, trial))
            console.print(*_row(way, trial))

    with TemporaryDirectory() as scratch:
        directory = Path(scratch)
        model_dir = None
        if options.shape is not None:
            model_dir = write_random_model(directory, options.shape, options.layers, options.experts)
        for pair in range(options.pairs):
            for way in (options.ways, options.ways[::-1])[pair % 2]:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(collect(way, pair, directory, model_dir))
    console.print(table)
    for number, objective in enumerate(options.objective_ms):
        rates = ", ".join(f"{way} {_most(trials, number):.2f}" for way, trials in found.items())
        console.print(f"sessions a second with {GOOD_SHARE:.0%} of first tokens in {objective:g} ms: {rates}")


if __name__ == "__main__":
    main()
