"""What arriving prompts do to the tokens of running requests, with and without prefill on a worker of its own.

    python -m bench.interference [--mixed-step-ms MS ...]

Two meshes of the shipped model take turns. In both, a few requests stream tokens while long prompts arrive one after
another, every prompt new to every cache. In the first ("pd") a prefill worker computes them and pushes their KV; in the
second ("ifb") the decode worker computes them between its steps. The decode worker has the machine's first core to
itself and all other processes, the client included, have the others, so that both meshes decode with the same means.

--mixed-step-ms adds a mesh like the second for each value, with that bound on a step that computes prompts and
tokens (engine.mixed_step_ms).

A gap is the time between two successive tokens of a stream. A step is the median gap while there is no prompt. A stall
is how much longer than a step a gap was, counted in steps.
"""

import argparse
import asyncio
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import grpc
import msgspec
import numpy as np
import uvloop
from deepmesh.v1 import gateway_pb2_grpc
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from bench.meshes.model_mesh import FIRST_TOKEN, LAST_TOKEN, ModelMesh, model_mesh
from bench.meshes.processes import pin
from bench.meshes.timed_generation import TimedGeneration, generate

# Prefill workers and settings of each mesh, which also has one decode worker. The settings send prompts where the
# comparison wants them, not where they would be answered soonest.
PD, IFB = (1, ("decode.can_prefill=false",)), (0, ())
# Wait until every stream has its first tokens.
SETTLE_SECONDS = 2.0
QUIET_SECONDS = 3.0
STREAM_PROMPT_TOKENS = 64
# More tokens than any measurement takes; with the prompt they fit the context.
STREAM_TOKENS = 16_000


@dataclass(frozen=True)
class Options:
    streams: int
    prompts: int
    prompt_tokens: int
    repeats: int
    seed: int
    mixed_step_ms: Sequence[float] = ()

    @property
    def meshes(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        """The number of prefill workers and the settings of each mesh, by its name."""
        bounded = {f"ifb, {ms:g} ms": (0, (f"decode.engine.mixed_step_ms={ms}",)) for ms in self.mixed_step_ms}
        return {"pd": PD, "ifb": IFB, **bounded}


@dataclass(frozen=True)
class Measurement:
    """One run of one mesh. Times are in seconds from the first prompt's arrival."""

    # (time, gap) of every token of every stream.
    gaps: list[tuple[float, float]]
    # When each long prompt was sent, and when its first token came.
    prompts: list[tuple[float, float]]

    @property
    def step(self) -> float:
        return median(gap for time, gap in self.gaps if time < 0)

    @property
    def disturbed(self) -> list[float]:
        """Gaps that ended while a long prompt was under way."""
        last = self.prompts[-1][1]
        return [gap for time, gap in self.gaps if 0 <= time <= last]

    @property
    def longest_stall(self) -> float:
        return max(self.disturbed) / self.step - 1

    @property
    def p99_stall(self) -> float:
        return float(np.percentile(self.disturbed, 99)) / self.step - 1

    @property
    def tpot(self) -> float:
        return sum(self.disturbed) / len(self.disturbed)

    @property
    def first_token_seconds(self) -> float:
        return median(answered - sent for sent, answered in self.prompts)


async def measure(mesh: ModelMesh, options: Options, rng: random.Random) -> Measurement:
    """Run the streams alone for a while, then with prompts one after another."""
    first, *others = sorted(os.sched_getaffinity(0))
    for name, process_id in mesh.process_ids.items():
        pin(process_id, {first} if name.startswith("decode") else set(others))
    async with grpc.aio.insecure_channel(mesh.gateway) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        streams = [TimedGeneration() for _ in range(options.streams)]
        tasks = [
            asyncio.create_task(generate(stub, _prompt(rng, STREAM_PROMPT_TOKENS), STREAM_TOKENS, stream))
            for stream in streams
        ]
        await asyncio.sleep(SETTLE_SECONDS)
        quiet_from = time.perf_counter()
        await asyncio.sleep(QUIET_SECONDS)
        started = time.perf_counter()
        prompts = []
        for _ in range(options.prompts):
            answer = await generate(stub, _prompt(rng, options.prompt_tokens), 2)
            prompts.append((answer.sent - started, answer.times[0] - started))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    gaps = [
        (token_time - started, gap)
        for stream in streams
        for token_time, gap in zip(stream.times[1:], stream.gaps(), strict=True)
        if token_time - gap >= quiet_from
    ]
    return Measurement(gaps, prompts)


def _prompt(rng: random.Random, tokens: int) -> list[int]:
    return rng.choices(range(FIRST_TOKEN, LAST_TOKEN), k=tokens)


async def run(options: Options, log: Path, console: Console) -> dict[str, list[Measurement]]:
    rng = random.Random(options.seed)
    measured: dict[str, list[Measurement]] = {name: [] for name in options.meshes}
    for repeat in range(options.repeats):
        for name, (prefill, settings) in options.meshes.items():
            async with model_mesh(log, prefill=prefill, settings=settings) as mesh:
                measurement = await measure(mesh, options, rng)
            measured[name].append(measurement)
            console.print(f"{repeat + 1}, {name}: longest stall {measurement.longest_stall:.2f} steps")
    return measured


def table(measured: dict[str, list[Measurement]], options: Options) -> Table:
    title = f"{options.streams} streams while prompts of {options.prompt_tokens:,} tokens arrive; medians"
    result = Table(title=title, title_justify="left")
    result.add_column("mesh")
    for heading in ("step ms", "TPOT ms", "p99 stall, steps", "longest stall, steps", "TTFT of the prompts s"):
        result.add_column(heading, justify="right")
    for name, repeats in measured.items():
        result.add_row(
            name,
            f"{median(each.step for each in repeats) * 1000:.1f}",
            f"{median(each.tpot for each in repeats) * 1000:.1f}",
            f"{median(each.p99_stall for each in repeats):.2f}",
            f"{median(each.longest_stall for each in repeats):.2f}",
            f"{median(each.first_token_seconds for each in repeats):.2f}",
        )
    return result


def plot(measured: dict[str, list[Measurement]], path: Path) -> None:
    """Every gap of the last repeat over time, one panel a mesh, with the prompts shaded."""
    figure = Figure(figsize=(13, 4), dpi=130, layout="constrained")
    panels = figure.subplots(1, len(measured), sharey=True)
    for axes, (name, repeats) in zip(panels, measured.items(), strict=True):
        last = repeats[-1]
        for sent, answered in last.prompts:
            axes.axvspan(sent, answered, color="#d97706", alpha=0.15)
        axes.plot(*zip(*((time, gap * 1000) for time, gap in last.gaps), strict=True), ".", markersize=2)
        axes.set_title(f"{name}: longest stall {last.longest_stall:.1f} steps", loc="left", fontsize=10)
        axes.set_xlabel("seconds; shaded: from a long prompt to its first token")
        axes.set_ylabel("time between tokens, ms")
        axes.set_yscale("log")
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Decode and prefill: on workers of their own, and on one.")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed-step-ms", type=float, nargs="+", default=[])
    parser.add_argument("--output", type=Path, default=Path("out/interference.json"))
    values = vars(parser.parse_args(arguments))
    output: Path = values.pop("output")
    output.parent.mkdir(parents=True, exist_ok=True)
    options, console = Options(**values), Console(highlight=False)
    measured = uvloop.run(run(options, output.with_suffix(".log"), console))
    output.write_bytes(msgspec.json.encode({"options": options, "measured": measured}))
    plot(measured, output.with_suffix(".png"))
    console.print(table(measured, options))
    console.print(f"saved {output} and {output.with_suffix('.png')}")


if __name__ == "__main__":
    main()
