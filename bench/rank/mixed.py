"""A long prompt and requests that decode: what each costs the other, by the prompt's share of the time.

`python -m bench.rank.mixed [--requests 32] [--prompt 131072] [--prompt-share 0.2 0.33 0.5]
[--step-tokens 1024 2048 4096] [--mixed-step-ms MS ...] [--layers N] [--kv bf16|fp8] [--prompts bf16|fp8]
[--experts fp8|w4a8|nvfp4] [--plot FILE]`

The bench runs one rank of DeepSeek-R1, like `bench.rank`. Requests decode around contexts of 3,500 tokens. Then a
prompt comes whose first half is cached, so that its next tokens take as long as its average token does; after some
steps, steps are timed. Each share of the time (engine.prompt_share) is measured with each size of a step
(engine.max_step_tokens), then each bound on a step (engine.mixed_step_ms) with the largest size. The prompt's rate is
also given as a share of its rate alone, in steps of the largest size.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from bench.rank.load import RankLoad
from bench.rank.model import MeasuredModel, make_rank
from bench.rank.plot import BLUE, GREY, ORANGE
from bench.rank.steps import CONTEXT, SPARE_TOKENS, WARM_STEPS, time_steps
from capacity.shapes import EXPERTS, SHAPES
from engine.backend import Backend
from engine.config import EngineConfig
from engine.engine import Engine
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve

QUIET_STEPS = 30
# Chunks of the prompt. The first ones are not timed, since their sizes follow from earlier measurements. Then this many
# are timed, each with the decode steps that follow it.
SETTLING_CHUNKS, TIMED_CHUNKS = 2, 2
# The same in steps, if every step has tokens of the prompt.
SETTLING_STEPS, TIMED_STEPS = 20, 40
# Requests decode for this many steps at most.
MOST_STEPS = 1600


@dataclass(frozen=True)
class Mixed:
    # The settings that bound the prompt's share of the time.
    bound: str
    quiet_ms: float
    # The requests' time per token with the prompt, and the longest between two tokens.
    tpot_ms: float
    longest_ms: float
    prompt_tokens_per_second: float


def tokens_per_second_alone(config: EngineConfig, backend: Backend, prompt: int, tokens: int) -> float:
    """Tokens a second of the prompt alone, over `tokens` tokens after its first half."""
    engine = Engine(config, backend, time.monotonic)
    load = RankLoad(engine, backend)
    # The first of the two runs compiles kernels.
    for _ in range(2):
        key = load.start_prompt(prompt, prompt // 2)
        # A step is launched before the one before it has ended. The first launch does not wait for a step's end, later
        # ones do; so begin to time after some steps.
        for _ in range(SETTLING_CHUNKS):
            _compute(engine, load, 1)
        started, first = time.perf_counter(), load.prompt_tokens_left
        _compute(engine, load, tokens)
        seconds = time.perf_counter() - started
        done = first - load.prompt_tokens_left
        load.cancel(key)
        load.drain()
    return done / seconds


def _compute(engine: Engine, load: RankLoad, tokens: int) -> None:
    """Take steps until at least this many tokens of the prompt have been launched."""
    first = load.prompt_tokens_left
    while first - load.prompt_tokens_left < tokens:
        _check_is_running(load)
        engine.step()


def _check_is_running(load: RankLoad) -> None:
    if not load.prompt_tokens_left:
        raise SystemExit("the prompt ended before enough of its steps were timed: give a longer --prompt")


def measure_mixed(config: EngineConfig, backend: Backend, requests: int, prompt: int) -> Mixed:
    load = RankLoad(Engine(config, backend, time.monotonic), backend)
    load.start_decoding(requests, CONTEXT - MOST_STEPS // 2, MOST_STEPS)
    load.decode_seconds(WARM_STEPS)
    quiet_ms = time_steps(load, requests, QUIET_STEPS).step_ms
    key = load.start_prompt(prompt, prompt // 2)
    settling, timed = (SETTLING_CHUNKS, TIMED_CHUNKS) if config.prompt_share else (SETTLING_STEPS, TIMED_STEPS)
    _chunks(load, settling)
    left = load.prompt_tokens_left
    seconds = _chunks(load, timed)
    done = left - load.prompt_tokens_left
    load.cancel(key)
    load.drain()
    bound = f"{config.prompt_share:g} of the time, steps of {config.max_step_tokens:,}" if config.prompt_share else ""
    bound = bound or f"steps of {config.mixed_step_ms:g} ms"
    return Mixed(bound, quiet_ms, mean(seconds) * 1000, max(seconds) * 1000, done / sum(seconds))


def _chunks(load: RankLoad, chunks: int) -> list[float]:
    """The seconds of each step, up to the one that launches the last of `chunks` chunks of the prompt."""
    seconds: list[float] = []
    while chunks:
        _check_is_running(load)
        left = load.prompt_tokens_left
        seconds += load.decode_seconds(1)
        chunks -= load.prompt_tokens_left < left
    return seconds


def table_of(measured: Sequence[Mixed], alone: float, title: str) -> Table:
    table = Table(title=title)
    columns = ("the prompt may take", "TPOT quiet, ms", "with it, ms", "times", "longest, ms")
    for column in (*columns, "prompt, tokens/s", "of its rate alone"):
        table.add_column(column, justify="right")
    for row in measured:
        rate = row.prompt_tokens_per_second
        cells = f"{row.quiet_ms:.1f}", f"{row.tpot_ms:.1f}", f"{row.tpot_ms / row.quiet_ms:.2f}"
        table.add_row(row.bound, *cells, f"{row.longest_ms:,.0f}", f"{rate:,.0f}", f"{rate / alone:.2f}")
    return table


def plot(measured: Sequence[Mixed], alone: float, path: Path) -> None:
    """A PNG of the prompt's rate over the requests' time per token."""
    figure = Figure(figsize=(7, 4.5), dpi=130, layout="constrained")
    axes = figure.subplots()
    for row in measured:
        at = row.tpot_ms / row.quiet_ms, row.prompt_tokens_per_second / alone
        axes.plot(*at, "o", color=BLUE)
        axes.annotate(
            f"{row.bound}; {row.longest_ms / 1000:.2g} s", at, textcoords="offset points", xytext=(6, 4), fontsize=7
        )
    times = [1 + step / 20 for step in range(31)]
    axes.plot(times, [1 - 1 / each for each in times], "--", color=ORANGE, label="in turn, each as fast as alone")
    axes.set(xlabel="time per token, times that without the prompt", ylabel="prompt's rate, share of that alone")
    axes.grid(color=GREY, alpha=0.18)
    axes.legend(fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="r1-ep8-rank")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="fp8")
    parser.add_argument("--prompts", choices=("bf16", "fp8"), default="bf16", help="in which they attend")
    parser.add_argument("--experts", choices=sorted(EXPERTS), default="fp8")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=131072, help="tokens")
    parser.add_argument("--prompt-share", type=float, nargs="*", default=[0.2, 0.33, 0.5], help="of the time")
    parser.add_argument("--step-tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--mixed-step-ms", type=float, nargs="*", default=[])
    parser.add_argument("--plot", type=Path, metavar="FILE")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a rank is measured on a CUDA device, and there is none here")
    model = MeasuredModel(given.shape, given.layers, given.experts, given.kv, given.prompts)
    with tempfile.TemporaryDirectory() as scratch:
        config = EngineConfig(
            **model.settings(Path(scratch)),
            max_requests=given.requests + 1,
            max_step_tokens=max(given.step_tokens),
            context_tokens=max(given.prompt, CONTEXT) + SPARE_TOKENS,
        )
        resolved = resolve(config, Hardware(torch.cuda.device_count(), 0))
        backend = ModelBackend(resolved, make_rank(resolved))
    alone = tokens_per_second_alone(config, backend, given.prompt, 2 * max(given.step_tokens))
    bounds: list[dict[str, object]] = [
        {"prompt_share": share, "max_step_tokens": tokens}
        for share in given.prompt_share
        for tokens in given.step_tokens
    ]
    bounds += [{"mixed_step_ms": ms} for ms in given.mixed_step_ms]
    measured = [
        measure_mixed(config.model_copy(update=bound), backend, given.requests, given.prompt) for bound in bounds
    ]
    title = f"{given.requests} requests with a prompt of {given.prompt:,} tokens, alone {alone:,.0f} tokens/s"
    Console(width=140).print(table_of(measured, alone, title))
    if given.plot is not None:
        plot(measured, alone, given.plot)


if __name__ == "__main__":
    main()
