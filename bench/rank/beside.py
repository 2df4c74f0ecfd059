"""A long prompt beside requests that decode, by how long steps with both may take: what each costs the other.

`python -m bench.rank.beside [--requests 32] [--prompt 131072] [--mixed-step-ms 40 50 60 80] [--layers N]
[--kv bf16|fp8] [--prompts bf16|fp8] [--experts fp8|w4a8|nvfp4] [--step-tokens 16384]`

One rank of DeepSeek-R1, as `bench.rank` has it. Requests decode around contexts of 3,500 tokens. A prompt comes whose
first half is cached, so that its next tokens take what one of its tokens takes in the mean; some steps later as many
are timed. The prompt's rate is also given as a share of the one that it has alone, in steps of --step-tokens.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from rich.console import Console
from rich.table import Table

from bench.rank.load import RankLoad
from bench.rank.model import EXPERTS, SHAPES, MeasuredModel, make_rank
from bench.rank.steps import CONTEXT, SPARE_TOKENS, start_steps, time_steps
from engine.batch import Backend
from engine.config import EngineConfig, Hardware, resolve
from engine.engine import Engine
from engine.runner.backend import ModelBackend

QUIET_STEPS = 30
# Until the number of a prompt's tokens follows from what steps take, and then timed.
SETTLING_STEPS, TIMED_STEPS = 20, 40


@dataclass(frozen=True)
class Beside:
    mixed_step_ms: float
    quiet_ms: float
    # The requests' time per token beside the prompt.
    tpot_ms: float
    prompt_tokens_per_second: float


def tokens_per_second_alone(config: EngineConfig, backend: Backend, prompt: int, tokens: int) -> float:
    """How fast so many tokens behind the first half of the prompt are computed."""
    engine = Engine(config, backend, time.monotonic)
    load = RankLoad(engine, backend)
    # The first time compiles.
    for _ in range(2):
        key = load.start_prompt(prompt, prompt // 2)
        started, first = time.perf_counter(), load.prompt_tokens_left
        while first - load.prompt_tokens_left < tokens:
            engine.step()
        seconds = time.perf_counter() - started
        done = first - load.prompt_tokens_left
        load.cancel(key)
        load.drain()
    return done / seconds


def measure_beside(config: EngineConfig, backend: Backend, requests: int, prompt: int) -> Beside:
    assert config.mixed_step_ms is not None
    load = RankLoad(Engine(config, backend, time.monotonic), backend)
    start_steps(load, requests, QUIET_STEPS + SETTLING_STEPS + TIMED_STEPS)
    quiet_ms = time_steps(load, requests, QUIET_STEPS).step_ms
    key = load.start_prompt(prompt, prompt // 2)
    load.decode_seconds(SETTLING_STEPS)
    left = load.prompt_tokens_left
    seconds = load.decode_seconds(TIMED_STEPS)
    done = left - load.prompt_tokens_left
    load.cancel(key)
    load.drain()
    return Beside(config.mixed_step_ms, quiet_ms, mean(seconds) * 1000, done / sum(seconds))


def table_of(measured: Sequence[Beside], alone: float, title: str) -> Table:
    table = Table(title=title)
    columns = ("a step may take, ms", "TPOT quiet, ms", "beside, ms", "times", "prompt, tokens/s", "of its rate alone")
    for column in columns:
        table.add_column(column, justify="right")
    for row in measured:
        rate = row.prompt_tokens_per_second
        cells = f"{row.quiet_ms:.1f}", f"{row.tpot_ms:.1f}", f"{row.tpot_ms / row.quiet_ms:.2f}", f"{rate:,.0f}"
        table.add_row(f"{row.mixed_step_ms:g}", *cells, f"{rate / alone:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="r1-ep8-rank")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="fp8")
    parser.add_argument("--prompts", choices=("bf16", "fp8"), default="bf16", help="in which they attend")
    parser.add_argument("--experts", choices=sorted(EXPERTS), default="fp8")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=131072, help="tokens")
    parser.add_argument("--mixed-step-ms", type=float, nargs="+", default=[40.0, 50.0, 60.0, 80.0])
    parser.add_argument("--step-tokens", type=int, default=16384)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a rank is measured on a CUDA device, and there is none here")
    model = MeasuredModel(given.shape, given.layers, given.experts, given.kv, given.prompts)
    with tempfile.TemporaryDirectory() as scratch:
        config = EngineConfig(
            **model.settings(Path(scratch)),
            max_requests=given.requests + 1,
            max_step_tokens=given.step_tokens,
            context_tokens=max(given.prompt, CONTEXT) + SPARE_TOKENS,
        )
        resolved = resolve(config, Hardware(torch.cuda.device_count(), 0))
        backend = ModelBackend(resolved, make_rank(resolved))
    alone = tokens_per_second_alone(config, backend, given.prompt, 2 * given.step_tokens)
    measured = [
        measure_beside(config.model_copy(update={"mixed_step_ms": ms}), backend, given.requests, given.prompt)
        for ms in given.mixed_step_ms
    ]
    title = f"{given.requests} requests beside a prompt of {given.prompt:,} tokens, alone {alone:,.0f} tokens/s"
    Console(width=120).print(table_of(measured, alone, title))


if __name__ == "__main__":
    main()
