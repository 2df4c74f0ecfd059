"""Requests that arrive at one rank: how evenly answers get their tokens, with whole prompts in a step and even steps.

`python -m bench.rank.arrivals [--shape moonlight] [--layers N] [--experts bf16] [--kv bf16|fp8]
[--lengths 1000/300 4000/300] [--shares 0.8 | --rates RATE ...] [--seconds 14] [--warm-up 5] [--steps null auto 2.2]
[--max-requests 256] [--step-tokens 8192] [--captured 1536]`

The engine that serves runs alone, as in `bench.rank`: no gateway, whose messages have several tokens when they are
many. For each pair of prompt and answer tokens the rank is first kept full, each request that ends being replaced by
another (saturation: requests a second). Then requests arrive by Poisson's law at shares of that rate, the same ones
for each value of `engine.mixed_step_ms`; those of the first seconds do not count, nor those that come while the last
ones that count end. A gap is the time from a request's token to its next, as the engine gives them.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.meshes.http_peers import Lengths
from bench.rank.load import RankLoad, fill_pool
from bench.rank.model import MeasuredModel, make_rank
from capacity.shapes import EXPERTS, SHAPES
from engine.backend import Backend
from engine.config import EngineConfig
from engine.engine import Engine
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve
from mesh.blocks import BLOCK_TOKENS

# How the rank is kept full: seconds before it is measured, and of the measurement.
FILLING_SECONDS, FULL_SECONDS = 3.0, 4.0
# Steps are told apart by their prompt tokens in as many classes.
TOKENS_TOGETHER = 512
# How long it waits at a time for the next arrival while nothing is to be computed.
IDLE_SECONDS = 0.001


@dataclass
class Answered:
    """When a request came, and when each of its tokens did, in seconds."""

    came_at: float
    token_times: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Arrived:
    """Requests at a rate a second, and what became of those that count."""

    load: str
    steps: str
    answered: Sequence[Answered]
    # For each step: its seconds, and its prompt tokens.
    taken: Sequence[tuple[float, int]]

    def gaps_ms(self, percentile: float) -> float:
        gaps = [np.diff(each.token_times) for each in self.answered]
        return float(np.percentile(np.concatenate(gaps), percentile)) * 1000

    def first_ms(self, percentile: float) -> float:
        return float(np.percentile([each.token_times[0] - each.came_at for each in self.answered], percentile)) * 1000

    @property
    def token_ms(self) -> float:
        """The median of the requests' time per token."""
        spans = [(each.token_times[-1] - each.token_times[0]) / (len(each.token_times) - 1) for each in self.answered]
        return float(np.median(spans)) * 1000


def saturation(config: EngineConfig, backend: Backend, lengths: Lengths, filling: float, full: float) -> float:
    """Requests that end in a second while the rank is full. filling: seconds before it is measured for `full` ones."""
    engine, rng = Engine(config, backend, time.monotonic), random.Random(0)
    load = RankLoad(engine, backend)
    # Requests of all ages, as if they had come one after another.
    for _ in range(config.max_requests):
        load.start_decoding(1, lengths.prompt, rng.randint(2, lengths.answer))
    began, ended = time.monotonic(), 0
    counted_from = began + filling
    while (now := time.monotonic()) < counted_from + full:
        result = engine.step()
        for output in () if result is None else result.outputs:
            if output.finish is not None:
                ended += now >= counted_from
                load.submit(load.prompt(lengths.prompt), lengths.answer)
    return ended / (now - counted_from)


def arrive(
    config: EngineConfig, backend: Backend, lengths: Lengths, rate: float, seconds: float, warm_up: float
) -> Arrived:
    """seconds: requests that come until then count, except those of the first `warm_up` seconds. Others keep coming
    until the last of these has ended: without them its last tokens would be next to no prompts.
    """
    engine, rng = Engine(config, backend, time.monotonic), random.Random(1)
    load, next_at, began = RankLoad(engine, backend), rng.expovariate(rate), time.monotonic()
    asked, taken, counted = dict[int, Answered](), list[tuple[float, int]](), list[Answered]()
    # If steps are launched ahead, the one that ends was launched with the tokens of the call before.
    ended, launched = began, 0
    while next_at < seconds or any(len(each.token_times) < lengths.answer for each in counted):
        now, queued = time.monotonic() - began, load.prompt_tokens_left
        while next_at <= now:
            answered = Answered(next_at)
            asked[load.submit(load.prompt(lengths.prompt), lengths.answer)] = answered
            if warm_up <= next_at < seconds:
                counted.append(answered)
            queued += lengths.prompt
            next_at += rng.expovariate(rate)
        if not engine.has_work():
            time.sleep(IDLE_SECONDS)
            ended = time.monotonic()
            continue
        result = engine.step()
        before, ended = ended, time.monotonic()
        for output in () if result is None else result.outputs:
            asked[output.key].token_times += [ended - began] * len(output.token_ids)
        launched_before, launched = launched, queued - load.prompt_tokens_left
        if began + warm_up <= ended < began + seconds:
            taken.append((ended - before, launched_before if backend.asynchronous else launched))
    for key in asked:
        load.cancel(key)
    load.drain()
    return Arrived(f"{lengths}, {rate:.3g} a second", str(config.mixed_step_ms), counted, taken)


def table_of(measured: Sequence[Arrived], title: str) -> Table:
    table = Table(title=title)
    for column in ("load", "mixed_step_ms", "gaps p50, ms", "p99", "p99 over p50", "TTFT p50, ms", "p99", "TPOT p50"):
        table.add_column(column)
    for column in ("steps with prompts", "their tokens", "ms", "others, ms"):
        table.add_column(column)
    for row in measured:
        middle, late = row.gaps_ms(50), row.gaps_ms(99)
        mixed, quiet = [each for each in row.taken if each[1]], [seconds for seconds, tokens in row.taken if not tokens]
        table.add_row(
            row.load, row.steps, f"{middle:.1f}", f"{late:.1f}", f"{late / middle:.2f}",
            f"{row.first_ms(50):,.0f}", f"{row.first_ms(99):,.0f}", f"{row.token_ms:.1f}",
            f"{len(mixed) / max(len(row.taken), 1):.0%}", f"{np.mean([tokens for _, tokens in mixed] or [0]):,.0f}",
            f"{1000 * np.mean([seconds for seconds, _ in mixed] or [0]):.1f}", f"{1000 * np.mean(quiet or [0]):.1f}",
        )  # fmt: skip
    return table


def steps_table(row: Arrived) -> Table:
    """How long steps took by how many prompt tokens they computed."""
    table = Table("prompt tokens", "steps", "ms p50", "p90", title=f"{row.load}, mixed_step_ms {row.steps}")
    kinds = sorted({-(-tokens // TOKENS_TOGETHER) for _, tokens in row.taken})
    for kind in kinds:
        ms = [1000 * seconds for seconds, tokens in row.taken if -(-tokens // TOKENS_TOGETHER) == kind]
        middle, late = np.percentile(ms, [50, 90])
        table.add_row(f"to {kind * TOKENS_TOGETHER:,}", str(len(ms)), f"{middle:.1f}", f"{late:.1f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="moonlight")
    parser.add_argument("--layers", type=int, help="by default all")
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--experts", choices=sorted(EXPERTS), default="bf16")
    default = [Lengths(1000, 300), Lengths(4000, 300)]
    parser.add_argument("--lengths", type=Lengths.parse, nargs="+", default=default, metavar="PROMPT/ANSWER")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.8], help="of saturation")
    parser.add_argument("--rates", type=float, nargs="+", help="a second, one for each of the lengths; no saturation")
    parser.add_argument("--seconds", type=float, default=14.0, help="for which requests come")
    parser.add_argument("--warm-up", type=float, default=5.0, help="seconds of them that do not count")
    parser.add_argument("--steps", nargs="+", default=["null", "auto"], help="values of engine.mixed_step_ms")
    parser.add_argument("--max-requests", type=int, default=256)
    parser.add_argument("--step-tokens", type=int, default=8192)
    default_tokens = EngineConfig.model_fields["prompt_graph_tokens"].default
    parser.add_argument("--captured", type=int, default=default_tokens, help="engine.prompt_graph_tokens")
    given = parser.parse_args()
    if given.rates is not None and len(given.rates) != len(given.lengths):
        parser.error("--rates has one rate for each of --lengths")
    if not torch.cuda.is_available():
        parser.error("a rank is measured on a CUDA device, and there is none here")
    model = MeasuredModel(
        given.shape, given.layers or SHAPES[given.shape]["num_hidden_layers"], given.experts, given.kv
    )
    longest = max(each.prompt + each.answer for each in given.lengths)
    with tempfile.TemporaryDirectory() as scratch:
        config = EngineConfig(
            **model.settings(Path(scratch)),
            max_requests=given.max_requests,
            max_step_tokens=given.step_tokens,
            prompt_graph_tokens=given.captured,
            context_tokens=longest + BLOCK_TOKENS,
        )
        resolved = resolve(config, Hardware(torch.cuda.device_count(), 0))
        backend = ModelBackend(resolved, make_rank(resolved))
    fill_pool(backend.state)
    console, measured = Console(width=180), list[Arrived]()
    forms = [config.model_copy(update={"mixed_step_ms": _step_ms(each)}) for each in given.steps]
    for number, lengths in enumerate(given.lengths):
        if given.rates is None:
            highest = saturation(forms[0], backend, lengths, FILLING_SECONDS, FULL_SECONDS)
            console.print(f"{lengths}: {highest:.3g} requests a second while full")
            rates = [share * highest for share in given.shares]
        else:
            rates = [given.rates[number]]
        for rate, form in product(rates, forms):
            measured.append(arrive(form, backend, lengths, rate, given.seconds, given.warm_up))
            console.print(table_of(measured[-1:], "measured"), steps_table(measured[-1]))
    console.print(table_of(measured, f"{model.title}, measured: {backend.speed}"))


def _step_ms(text: str) -> float | str | None:
    return {"null": None, "auto": "auto"}.get(text) if text in ("null", "auto") else float(text)


if __name__ == "__main__":
    main()
