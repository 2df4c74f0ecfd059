"""The time to first token of a prompt with a known prefix: computed again, from the worker's pool, from the KV store.

    python -m bench.prefix_ttft

A mesh of one prefill worker, one decode worker and one store serves the shipped model. Each repeat draws a new prefix
and asks it three times with other endings: new to everybody; again at once, when the prefill worker's pool holds it;
and after prompts that push it out of both pools, when only the store does. How much was not computed again is what the
answer's usage says.
"""

import argparse
import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from statistics import median

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
# Offers leave outside the token path: wait for them.
OFFER_SECONDS = 1.0
CASES = ("recomputed", "pool", "store")


@dataclass(frozen=True)
class Options:
    prefix_tokens: int
    repeats: int
    seed: int


@dataclass(frozen=True)
class Answer:
    ttft_ms: float
    cached_tokens: int


async def run(options: Options, log: Path, console: Console) -> dict[str, list[Answer]]:
    rng = random.Random(options.seed)
    # Room for two such prompts, so that the next ones push a prefix out.
    blocks = 2 * (-(-options.prefix_tokens // BLOCK_TOKENS) + 2)
    settings = [f"{role}.engine.total_blocks={blocks}" for role in ("prefill", "decode")]
    settings.append("decode.can_prefill=false")
    answers: dict[str, list[Answer]] = {case: [] for case in CASES}
    async with (
        model_mesh(log, prefill=1, stores=1, settings=settings) as mesh,
        grpc.aio.insecure_channel(mesh.gateway) as channel,
    ):
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        # The first prompt of a mesh measures rates and opens connections.
        await generate(stub, _tokens(rng, options.prefix_tokens), 2)
        for repeat in range(options.repeats):
            prefix = _tokens(rng, options.prefix_tokens)
            for case in CASES:
                if case == "store":
                    await asyncio.sleep(OFFER_SECONDS)
                    for _ in range(3):
                        await generate(stub, _tokens(rng, options.prefix_tokens), 2)
                result = await generate(stub, [*prefix, *_tokens(rng, ENDING_TOKENS)], 2)
                answers[case].append(_answer(result))
                console.print(f"{repeat + 1}, {case}: {answers[case][-1]}")
    return answers


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
