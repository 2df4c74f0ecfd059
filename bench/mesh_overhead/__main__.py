"""What the mesh adds to the engine: time per token of streams through gateway and decode worker, and of the engine
alone.

    python -m bench.mesh_overhead [--streams 64] [--layers 61 | --model models/tiny-r1]

The same engine answers the same prompts alone in a process, and in a whole mesh as `deepmesh up` starts it, with one
gRPC stream a prompt. The two take turns, beginning and ending with the engine alone. By default the engine is one rank
of DeepSeek-R1 on one GPU with random weights. The gates are random too and leave many experts without tokens, so that a
step is shorter than that of bench.rank, and harder to keep up with. `--model` names a checkpoint instead, which a CPU
needs.

Time per token is the mean gap between a stream's tokens while every stream decodes.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import msgspec
import uvloop
from deepmesh.v1 import gateway_pb2_grpc
from rich.console import Console
from rich.table import Table

from bench.mesh_overhead.engine_alone import EngineTask
from bench.meshes.model_mesh import FIRST_TOKEN, LAST_TOKEN, model_mesh
from bench.meshes.processes import CpuMeter
from bench.meshes.timed_generation import TimedGeneration, generate
from bench.rank.model import write_shape
from capacity.shapes import DEEPSEEK_R1
from engine.config import EngineConfig
from launcher.gpus import find_gpus
from loadgen.summary import Distribution, distribution
from mesh.errors import ProcessFailed
from mesh.processes.tethered import tethered
from tools.byte_tokenizer import write_tokenizer
from worker.ranks.process import rank_environment

SHAPE = "r1-ep8-rank"
STEP_TOKENS = 8192
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Options:
    # A checkpoint's directory; None for random weights of `layers` layers.
    model: Path | None
    layers: int
    streams: int
    prompt_tokens: int
    tokens: int
    # Times count once every stream has this many tokens.
    settle: int
    repeats: int
    seed: int


@dataclass(frozen=True)
class MeshRun:
    gaps_ms: Distribution
    # Cores kept busy, by process.
    cores: dict[str, float]


@dataclass
class Overhead:
    options: Options
    engine: list[Distribution] = field(default_factory=list)
    mesh: list[MeshRun] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Time per token with the mesh, divided by that of the engine alone."""
        return mean(run.gaps_ms.mean for run in self.mesh) / mean(gaps.mean for gaps in self.engine)


def steady_gaps(streams: Sequence[Sequence[float]], settle: int) -> list[float]:
    """Gaps between tokens, from when every stream has `settle` tokens until the first stream ends."""
    begin, end = max(times[settle] for times in streams), min(times[-1] for times in streams)
    return [
        later - earlier for times in streams for earlier, later in pairwise(times) if begin <= earlier and later <= end
    ]


def _distribution(streams: Sequence[Sequence[float]], options: Options) -> Distribution:
    found = distribution(steady_gaps(streams, options.settle))
    assert found is not None, "streams that never decode at once: fewer of them, or more tokens each"
    return found


def engine_values(options: Options) -> dict[str, Any]:
    """The settings that both engines share, besides their model's directory."""
    values: dict[str, Any] = {
        "max_requests": options.streams,
        "graph_rows": [options.streams],
        "max_step_tokens": STEP_TOKENS,
        "context_tokens": options.prompt_tokens + options.tokens,
        # A worker on a GPU would choose drafts, which the engine alone does not.
        "drafts": {"next_n": 0},
        # The bench runs each kind of step once before it measures.
        "warm_up": "off",
    }
    return values if options.model is not None else values | {"random_weights": True}


def draw_prompts(options: Options) -> list[list[int]]:
    rng = random.Random(options.seed)
    return [rng.choices(range(FIRST_TOKEN, LAST_TOKEN), k=options.prompt_tokens) for _ in range(options.streams)]


async def run_engine(options: Options, model_dir: Path, scratch: Path, log: Path) -> Distribution:
    """Raises ProcessFailed."""
    values = {"model_dir": str(model_dir), **engine_values(options)}
    task, times = scratch / "task.json", scratch / "times.json"
    task.write_bytes(msgspec.json.encode(EngineTask(values, draw_prompts(options), options.tokens)))
    with log.open("a", encoding="utf-8") as output:
        process = await asyncio.create_subprocess_exec(
            *tethered([sys.executable, "-m", "bench.mesh_overhead.engine_alone", str(task), str(times)]),
            stdout=output,
            stderr=output,
            env=rank_environment(EngineConfig.model_validate(values)),
        )
        if await process.wait():
            raise ProcessFailed(f"the engine alone ended with status {process.returncode}: see {log}")
    return _distribution(msgspec.json.decode(times.read_bytes(), type=list[list[float]]), options)


async def run_mesh(options: Options, model_dir: Path, log: Path) -> MeshRun:
    """Raises MeshError."""
    settings = [
        f"decode.engine.{key}={msgspec.json.encode(value).decode()}" for key, value in engine_values(options).items()
    ]
    async with (
        model_mesh(log, model_dir=model_dir, settings=settings) as mesh,
        grpc.aio.insecure_channel(mesh.gateway) as channel,
    ):
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        streams = [TimedGeneration() for _ in range(options.streams)]
        async with asyncio.TaskGroup() as tasks:
            for prompt, stream in zip(draw_prompts(options), streams, strict=True):
                tasks.create_task(generate(stub, prompt, options.tokens, stream))
            await _until(streams, options.settle)
            meter = CpuMeter(mesh.process_ids)
            await _until(streams, (options.settle + options.tokens) // 2)
            cores = meter.cores()
    return MeshRun(_distribution([stream.times for stream in streams], options), cores)


async def _until(streams: Sequence[TimedGeneration], tokens: int) -> None:
    while True:
        if all(len(stream.times) >= tokens for stream in streams):
            return
        await asyncio.sleep(POLL_SECONDS)


async def run(options: Options, log: Path, console: Console) -> Overhead:
    overhead = Overhead(options)

    async def alone() -> None:
        overhead.engine.append(await run_engine(options, model_dir, scratch, log))
        console.print(f"engine alone: {overhead.engine[-1].mean:.3f} ms a token")

    with TemporaryDirectory() as directory:
        scratch = Path(directory)
        model_dir = options.model or make_shape(scratch, options.layers)
        await alone()
        for _ in range(options.repeats):
            overhead.mesh.append(await run_mesh(options, model_dir, log))
            console.print(f"whole mesh: {overhead.mesh[-1].gaps_ms.mean:.3f} ms a token")
            await alone()
    return overhead


def make_shape(directory: Path, layers: int) -> Path:
    """Write configuration and tokenizer of the shape: an engine with random weights and a gateway need no more."""
    write_tokenizer(directory, DEEPSEEK_R1["vocab_size"], DEEPSEEK_R1["max_position_embeddings"])
    return write_shape(directory, SHAPE, layers)


def table(overhead: Overhead) -> Table:
    options = overhead.options
    title = f"{options.streams} streams of {options.tokens} tokens after {options.prompt_tokens:,}: ms between tokens"
    result = Table(title=title, title_justify="left", min_width=len(title))
    result.add_column("")
    for heading in ("mean", "p50", "p99", "max"):
        result.add_column(heading, justify="right")
    rows = [("engine alone", gaps) for gaps in overhead.engine]
    rows += [("whole mesh", each.gaps_ms) for each in overhead.mesh]
    for name, gaps in rows:
        result.add_row(name, *(f"{value:.3f}" for value in (gaps.mean, gaps.p50, gaps.p99, gaps.max)))
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time per token with and without the mesh around the engine.")
    parser.add_argument("--model", type=Path, help="a checkpoint with its tokenizer, instead of the shape")
    parser.add_argument("--layers", type=int, default=61, help="of the shape")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--settle", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("out/mesh-overhead.json"))
    values = vars(parser.parse_args(arguments))
    if values["model"] is None and not find_gpus():
        parser.error("the shape needs a GPU, and there is none here: name a checkpoint, as --model models/tiny-r1")
    output: Path = values.pop("output")
    output.parent.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, width=120)
    overhead = uvloop.run(run(Options(**values), output.with_suffix(".log"), console))
    output.write_bytes(msgspec.json.encode(overhead, enc_hook=str))
    console.print(table(overhead))
    for each in overhead.mesh:
        console.print("cores in use: " + ", ".join(f"{name} {busy:.2f}" for name, busy in each.cores.items()))
    console.print(f"mesh to engine: {overhead.ratio:.4f}; saved {output}")


if __name__ == "__main__":
    main()
