"""Servers of one model, one after another on the same machine, under the same loads over their OpenAI HTTP.

`python -m bench.meshes.http_peers --server NAME=COMMAND [--server NAME=COMMAND ...] [--streams 1 16 64 256]
[--lengths 1000/300 4000/300] [--rounds 4]
[--vocabulary 32000] [--out DIR]`

COMMAND starts a server, with `{port}` where its HTTP port belongs. For one GPU, with random weights:

    --server "deepmesh=deepmesh up --model DIR --random-weights --http-port {port}"
    --server "vllm=vllm serve DIR --load-format dummy --port {port}"

For each pair of prompt and answer tokens: some streams, each with one request after another (output tokens/s and time
per token), then requests at half of the rate that the most streams reached (TTFT). Ratios are those of the first
server to each other one. The servers' own lines go to DIR/NAME.log.
"""

import argparse
import asyncio
import itertools
import os
import shlex
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadgen.options import LoadOptions
from loadgen.run import load
from loadgen.summary import Distribution, Summary
from mesh.errors import EndpointUnavailable, UnknownModel
from mesh.openai_client import OpenAIClient
from mesh.ports import free_port

# Requests of the load at half of the highest rate.
REQUESTS_AT_HALF = 120
# Weights are drawn, kernels compiled and graphs captured before a server answers.
START_SECONDS, STOP_SECONDS = 900.0, 60.0


@dataclass(frozen=True)
class Server:
    name: str
    command: str

    @classmethod
    def parse(cls, text: str) -> "Server":
        name, equals, command = text.partition("=")
        if not (name and equals and "{port}" in command):
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COMMAND with {{port}} in it")
        return cls(name, command)


@dataclass(frozen=True)
class Lengths:
    """Tokens of each prompt and of each answer, of which a time per token needs two."""

    prompt: int
    answer: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        prompt, _, answer = text.partition("/")
        if not (prompt.isdecimal() and answer.isdecimal() and int(prompt) >= 1 and int(answer) >= 2):
            raise argparse.ArgumentTypeError(f"{text!r} is not PROMPT/ANSWER in tokens, at least 1/2")
        return cls(int(prompt), int(answer))

    def __str__(self) -> str:
        return f"{self.prompt:,} in, {self.answer:,} out"


@dataclass(frozen=True)
class Row:
    """One figure of one load. `more_is_better` says which way a ratio counts."""

    load: str
    figure: str
    value: float
    more_is_better: bool = False


@asynccontextmanager
async def running(server: Server, log: Path) -> AsyncIterator[str]:
    """Start the server, its lines to `log`, and give its base URL once it lists its model.

    Raises EndpointUnavailable if it ends, or takes START_SECONDS.
    """
    port = free_port()
    command = shlex.split(server.command.replace("{port}", str(port)))
    url = f"http://127.0.0.1:{port}/v1"
    with log.open("wb") as lines:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=lines, stderr=asyncio.subprocess.STDOUT, start_new_session=True
        )
    try:
        await _until_served(url, process, server.name, log)
        yield url
    finally:
        await _stop(process)


async def _until_served(url: str, process: asyncio.subprocess.Process, name: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    async with OpenAIClient(url, None, timeout_s=10) as client:
        while True:
            with suppress(EndpointUnavailable, UnknownModel):
                await client.find_model(None)
                return
            if process.returncode is not None or time.monotonic() > end:
                why = (
                    f"ended with {process.returncode}" if process.returncode is not None else "takes too long to start"
                )
                raise EndpointUnavailable(f"{name} {why}: see {log}")
            await asyncio.sleep(0.2)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the process and all that it started, which may hold a GPU's memory."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


@dataclass(frozen=True)
class Loads:
    """streams: numbers of streams, each of which has `rounds` requests, one after another. Prompts' tokens have ids
    below `vocabulary`.
    """

    streams: Sequence[int]
    lengths: Sequence[Lengths]
    rounds: int
    vocabulary: int


async def measure(url: str, loads: Loads) -> AsyncIterator[Row]:
    # A seed for each load: no prompt comes twice, and none is found in a cache.
    seeds = itertools.count()
    for each in loads.lengths:
        highest = 0.0
        asked: dict[str, object] = {"isl": each.prompt, "osl": each.answer, "vocabulary_size": loads.vocabulary}
        for number in loads.streams:
            at_once = {"rate": float("inf"), "requests": number * loads.rounds, "max_concurrency": number}
            done = await _summary(url, asked | at_once | {"seed": next(seeds)})
            name = f"{each}, {number} at once"
            yield Row(name, "output tokens/s", done.output_tokens_per_second, more_is_better=True)
            yield Row(name, "time per token, p50, ms", _of(done.tpot_ms).p50)
            highest = max(highest, done.requests_per_minute / 60)
        at_half = {"rate": highest / 2, "requests": REQUESTS_AT_HALF, "seed": next(seeds)}
        ttft_ms = _of((await _summary(url, asked | at_half)).ttft_ms)
        name = f"{each}, at half of its highest rate"
        yield Row(name, "requests/s", highest / 2, more_is_better=True)
        yield Row(name, "TTFT, p50, ms", ttft_ms.p50)
        yield Row(name, "TTFT, p99, ms", ttft_ms.p99)


async def _summary(url: str, options: dict[str, object]) -> Summary:
    """Raises EndpointUnavailable if a request fails: rates of what is left would flatter the server."""
    chosen = LoadOptions.model_validate({"url": url, "api": "completions"} | options)
    summary = (await load(chosen)).summary
    if summary.errors:
        raise EndpointUnavailable(f"{url}: {summary.completed} of {summary.requests} answered: {summary.errors}")
    return summary


def _of(distribution: Distribution | None) -> Distribution:
    assert distribution is not None, "every request was answered, with more than one token"
    return distribution


def table_of(measured: dict[str, list[Row]]) -> Table:
    """A row a figure, with how many times as good the first server's is."""
    first, *others = measured
    table = Table("load", "", *measured, *(f"{first} : {other}" for other in others))
    for number, row in enumerate(measured[first]):
        values = [rows[number] for rows in measured.values()]
        ratios = [ratio(row, other) for other in values[1:]]
        cells = [f"{each.value:,.4g}" for each in values]
        table.add_row(row.load, row.figure, *cells, *(f"{each:.2f}" for each in ratios))
    return table


def ratio(row: Row, other: Row) -> float:
    """How many times as good `row` is: more tokens a second, or less time."""
    return row.value / other.value if row.more_is_better else other.value / row.value


async def compare(servers: Sequence[Server], loads: Loads, out: Path, console: Console) -> Table:
    """Rows go to the console as they are measured: a run that is cut off has said them."""
    measured: dict[str, list[Row]] = {}
    for server in servers:
        began_at = time.monotonic()
        async with running(server, out / f"{server.name}.log") as url:
            rows = measured[server.name] = [Row("start", "until the model is listed, s", time.monotonic() - began_at)]
            async for row in measure(url, loads):
                console.print(server.name, row.load, row.figure, f"{row.value:,.4g}", sep=" | ")
                rows.append(row)
    return table_of(measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=Server.parse, action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    default = [Lengths(1000, 300), Lengths(4000, 300)]
    parser.add_argument("--lengths", type=Lengths.parse, nargs="+", default=default, metavar="PROMPT/ANSWER")
    parser.add_argument("--rounds", type=int, default=4, help="requests of each stream, one after another")
    vocabulary = "ids of the prompts' tokens are below it: a size that all the servers' models have"
    parser.add_argument("--vocabulary", type=int, default=32000, help=vocabulary)
    parser.add_argument("--out", type=Path, default=Path("out"))
    given = parser.parse_args()
    console = Console(width=200)
    loads = Loads(given.streams, given.lengths, given.rounds, given.vocabulary)
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        table = asyncio.run(compare(given.server, loads, given.out, console))
    except EndpointUnavailable as error:
        parser.exit(1, f"{error}\n")
    console.print(table)


if __name__ == "__main__":
    main()
