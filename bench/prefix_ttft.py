"""The time to first token of a prompt with a known prefix: computed again, from the pool, from host memory, from a KV
store's memory, from its disk.

    python -m bench.prefix_ttft [--prefix-tokens 8192] [--directory ON_THE_DISK]

A mesh of one prefill worker, one decode worker and one store serves the shipped model. Each repeat draws a new prefix
and sends it with different endings: first when no process has it; again at once, when the prefill worker's pool holds
it; and after prompts that push it out of both pools, when only the store holds it. Then the same is done with workers
that keep evicted blocks in host memory; and with a store that has a disk and memory for two such prompts, so that the
other prompts push the prefix out of memory too. The answer's usage says how many tokens were not computed again.
"""

import argparse
import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, gettempdir

import grpc
import msgspec
import uvloop
from deepmesh.v1 import gateway_pb2_grpc
from rich.console import Console
from rich.table import Table

from bench.meshes.model_mesh import FIRST_TOKEN, LAST_TOKEN, model_mesh
from bench.meshes.timed_generation import TimedGeneration, generate
from mesh.blocks import BLOCK_TOKENS

ENDING_TOKENS = 32
# Offers are sent outside the token path: wait so long for them.
OFFER_SECONDS = 1.0
STORE_BYTES = 4 << 30
# A block of tiny-r1 holds 64 tokens of 576 values in float32, in 7 layers.
BLOCK_BYTES = 64 * 576 * 4 * 7
# This many other prompts push a prefix out of a pool with room for two.
OTHERS = 3


@dataclass(frozen=True)
class Options:
    prefix_tokens: int
    repeats: int
    seed: int
    # A directory on the disk that is measured.
    directory: str


@dataclass(frozen=True)
class Answer:
    ttft_ms: float
    cached_tokens: int


class Scene:
    """One mesh and the prompts that are sent to it."""

    def __init__(self, stub: gateway_pb2_grpc.GatewayServiceStub, options: Options, console: Console) -> None:
        self._stub = stub
        self._tokens = options.prefix_tokens
        self._rng = random.Random(options.seed)
        self._console = console
        self.answers: dict[str, list[Answer]] = {}

    async def new(self) -> list[int]:
        """A prefix that no process has yet."""
        return _tokens(self._rng, self._tokens)

    async def ask(self, prefix: list[int], case: str) -> None:
        result = await generate(self._stub, [*prefix, *_tokens(self._rng, ENDING_TOKENS)], 2)
        self.answers.setdefault(case, []).append(_answer(result))
        self._console.print(f"{case}: {self.answers[case][-1]}")

    async def push_out(self) -> None:
        for _ in range(OTHERS):
            await asyncio.sleep(OFFER_SECONDS)
            await generate(self._stub, await self.new(), 2)
        await asyncio.sleep(OFFER_SECONDS)


@asynccontextmanager
async def scene(
    options: Options, log: Path, console: Console, *settings: str, host_blocks: int = 0
) -> AsyncIterator[Scene]:
    # The pools have room for two such prompts, so that the next ones push a prefix out.
    sizes = {"total_blocks": _room_for_two(options), "host_blocks": host_blocks}
    memories = [f"{role}.engine.{key}={blocks}" for role in ("prefill", "decode") for key, blocks in sizes.items()]
    async with (
        model_mesh(log, prefill=1, stores=1, settings=[*memories, "decode.can_prefill=false", *settings]) as mesh,
        grpc.aio.insecure_channel(mesh.gateway) as channel,
    ):
        running = Scene(gateway_pb2_grpc.GatewayServiceStub(channel), options, console)
        # Not measured: with a mesh's first prompt, workers measure their rates and open connections.
        await generate(gateway_pb2_grpc.GatewayServiceStub(channel), await running.new(), 2)
        yield running


async def run(options: Options, log: Path, console: Console) -> dict[str, list[Answer]]:
    async with scene(options, log, console, f"kvstore.memory_bytes={STORE_BYTES}") as it:
        for _ in range(options.repeats):
            prefix = await it.new()
            await it.ask(prefix, "recomputed")
            await it.ask(prefix, "pool")
            await it.push_out()
            await it.ask(prefix, "store's memory")
    answers = it.answers
    async with scene(options, log, console, host_blocks=2 * OTHERS * _room_for_two(options)) as it:
        for _ in range(options.repeats):
            prefix = await it.new()
            await it.ask(prefix, "recomputed")
            await it.push_out()
            await it.ask(prefix, "host memory")
    answers = _merged(answers, it.answers)
    with TemporaryDirectory(dir=options.directory) as directory:
        memory_bytes = _room_for_two(options) * BLOCK_BYTES
        disk = (f"kvstore.disk.path={directory}", f"kvstore.disk.bytes={STORE_BYTES}", "kvstore.disk.least_uses=0")
        async with scene(options, log, console, f"kvstore.memory_bytes={memory_bytes}", *disk) as it:
            for _ in range(options.repeats):
                prefix = await it.new()
                await it.ask(prefix, "recomputed")
                await it.push_out()
                await it.ask(prefix, "store's disk")
    return _merged(answers, it.answers)


def _merged(first: dict[str, list[Answer]], second: dict[str, list[Answer]]) -> dict[str, list[Answer]]:
    return {case: first.get(case, []) + second.get(case, []) for case in first | second}


def _room_for_two(options: Options) -> int:
    return 2 * (-(-options.prefix_tokens // BLOCK_TOKENS) + 2)


def _answer(result: TimedGeneration) -> Answer:
    return Answer(result.after_sending(0) * 1000, result.cached_tokens)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(FIRST_TOKEN, LAST_TOKEN), k=count)


def table(answers: dict[str, list[Answer]], options: Options) -> Table:
    result = Table(
        title=f"TTFT with a shared prefix of {options.prefix_tokens:,} tokens; medians", title_justify="left"
    )
    result.add_column("prefix")
    for heading in ("TTFT ms", "of recomputing", "cached tokens"):
        result.add_column(heading, justify="right")
    recomputed = median(each.ttft_ms for each in answers["recomputed"])
    for case, repeats in answers.items():
        ttft = median(each.ttft_ms for each in repeats)
        cached = median(each.cached_tokens for each in repeats)
        result.add_row(case, f"{ttft:.0f}", f"{ttft / recomputed:.2f}", f"{cached:.0f}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="TTFT of a shared prefix, by where it is cached.")
    parser.add_argument("--prefix-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", default=gettempdir(), help="on the disk that is measured")
    parser.add_argument("--output", type=Path, default=Path("out/prefix-ttft.json"))
    values = vars(parser.parse_args())
    output: Path = values.pop("output")
    output.parent.mkdir(parents=True, exist_ok=True)
    options, console = Options(**values), Console(highlight=False)
    answers = uvloop.run(run(options, output.with_suffix(".log"), console))
    output.write_bytes(msgspec.json.encode({"options": options, "answers": answers}))
    console.print(table(answers, options))
    console.print(f"saved {output}")


if __name__ == "__main__":
    main()
