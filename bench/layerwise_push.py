"""Pushing a prompt's KV per layer group while later layers compute, compared with pushing it whole afterwards.

    python -m bench.layerwise_push

Two meshes of one prefill and one decode worker take turns on the same new prompts; they differ in the threshold above
which a landing is layerwise. The bench times the first decoded token, which is the answer's second: the first comes
from the prefill worker and needs no KV.
"""

import argparse
import random
from collections.abc import Sequence
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
from bench.meshes.timed_generation import generate

LAYERWISE_TOKENS = {"layerwise": 64, "whole": 1 << 20}
# Tokens of a prompt that warms both workers up.
WARMUP_TOKENS = 512


@dataclass(frozen=True)
class Answer:
    prompt_tokens: int
    first_token_s: float
    first_decoded_token_s: float

    @property
    def wait_ms(self) -> float:
        """Time from the first token to the first decoded one: the part of the push that is not hidden, and one step."""
        return (self.first_decoded_token_s - self.first_token_s) * 1000


async def run(lengths: Sequence[int], repeats: int, log: Path, console: Console) -> dict[str, list[Answer]]:
    answers: dict[str, list[Answer]] = {name: [] for name in LAYERWISE_TOKENS}
    for repeat in range(repeats):
        for name, threshold in LAYERWISE_TOKENS.items():
            rng = random.Random(repeat)
            thresholds = (f"{role}.engine.transfer.layerwise_tokens={threshold}" for role in ("decode", "prefill"))
            settings = ("decode.can_prefill=false", *thresholds)
            async with (
                model_mesh(log, prefill=1, settings=settings) as mesh,
                grpc.aio.insecure_channel(mesh.gateway) as channel,
            ):
                stub = gateway_pb2_grpc.GatewayServiceStub(channel)
                for length in (WARMUP_TOKENS, *lengths):
                    result = await generate(stub, rng.choices(range(FIRST_TOKEN, LAST_TOKEN), k=length), 3)
                    answer = Answer(length, result.after_sending(0), result.after_sending(1))
                    console.print(f"{repeat + 1}, {name}, {length:,}: {answer.wait_ms:.1f} ms after the first token")
                    if length != WARMUP_TOKENS:
                        answers[name].append(answer)
    return answers


def table(answers: dict[str, list[Answer]], lengths: Sequence[int]) -> Table:
    result = Table(title="The first decoded token; medians", title_justify="left")
    for heading in ("prompt tokens", "push", "first token s", "first decoded token s", "between them ms"):
        result.add_column(heading, justify="right")
    for length in lengths:
        for name, repeats in answers.items():
            of_length = [each for each in repeats if each.prompt_tokens == length]
            result.add_row(
                f"{length:,}",
                name,
                f"{median(each.first_token_s for each in of_length):.2f}",
                f"{median(each.first_decoded_token_s for each in of_length):.2f}",
                f"{median(each.wait_ms for each in of_length):.1f}",
            )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Layerwise against whole pushes of a prompt's KV.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 16000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("out/layerwise-push.json"))
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    log = options.output.with_suffix(".log")
    answers = uvloop.run(run(options.lengths, options.repeats, log, console))
    options.output.write_bytes(msgspec.json.encode(answers))
    console.print(table(answers, options.lengths))
    console.print(f"saved {options.output}")


if __name__ == "__main__":
    main()
