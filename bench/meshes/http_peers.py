"""Servers of one model, one after another on the same machine, under the same loads over their OpenAI HTTP.

`python -m bench.meshes.http_peers --server NAME=COMMAND [--server NAME=COMMAND ...] [--streams 1 16 64 256]
[--lengths 1000/300 4000/300] [--rounds 4] [--shares 0.5] [--rates RATE ...] [--requests 120]
[--ttft-ms 2000] [--tpot-ms 50] [--vocabulary 32000] [--out DIR]`

COMMAND starts a server, with `{port}` where its HTTP port belongs. For one GPU, with random weights:

    --server "deepmesh=deepmesh up --model DIR --random-weights --http-port {port}"
    --server "vllm=vllm serve DIR --load-format dummy --port {port}"

For each pair of prompt and answer tokens: requests that arrive by themselves at given rates (times to first tokens and
between tokens; what is good of the first fifth and of the last), then some streams, each with one request after another
(output tokens/s and time per token), then arrivals at shares of the highest rate that streams reached. Ratios are those
of the first server to each other one. The servers' own lines go to DIR/NAME.log. Two settings of deepmesh are two
servers; at the same load, with answers held up by prompts, for example:

    --server "even=deepmesh up --model DIR --random-weights --http-port {port}"
    --server "whole=deepmesh up --model DIR --random-weights --http-port {port} --set decode.engine.mixed_step_ms=null"
    --streams --shares --rates 30 --requests 900
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

from loadgen.options import SEARCH_TPOT_MS, SEARCH_TTFT_MS, LoadOptions
from loadgen.report import Report
from loadgen.run import load
from loadgen.summary import Distribution, Objectives, summarize
from mesh.errors import EndpointUnavailable, UnknownModel
from mesh.openai_client import OpenAIClient
from mesh.ports import free_port

# The first and the last fifth of a load are compared: requests that arrive early may fare worse.
FIFTH = 5
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
    """streams: numbers of streams, each of which has `rounds` requests, one after another. shares, rates: loads of
    `requests` requests that arrive at these shares of the highest rate of the streams, and at these rates a second;
    of these a good one has its first token within ttft_ms and its others every tpot_ms. Prompts' tokens have ids below
    `vocabulary`.
    """

    streams: Sequence[int]
    lengths: Sequence[Lengths]
    rounds: int
    shares: Sequence[float]
    rates: Sequence[float]
    requests: int
    ttft_ms: float
    tpot_ms: float
    vocabulary: int

    @property
    def bounds(self) -> dict[str, object]:
        return {"ttft_slo_ms": self.ttft_ms, "tpot_slo_ms": self.tpot_ms}


async def measure(url: str, loads: Loads) -> AsyncIterator[Row]:
    # A seed for each load: no prompt comes twice, and none is found in a cache.
    seeds = itertools.count()
    for each in loads.lengths:
        highest = 0.0
        asked: dict[str, object] = {"isl": each.prompt, "osl": each.answer, "vocabulary_size": loads.vocabulary}

        async def arriving(name: str, rate: float, asked: dict[str, object] = asked) -> list[Row]:
            options = asked | {"rate": rate, "requests": loads.requests, "seed": next(seeds)} | loads.bounds
            return rows_of(name, await _report(url, options))

        # First, so that the first fifth of the first of them finds a server that has served nothing.
        for rate in loads.rates:
            for row in await arriving(f"{each}, {rate:g} a second", rate):
                yield row
        for number in loads.streams:
            at_once = {"rate": float("inf"), "requests": number * loads.rounds, "max_concurrency": number}
            done = (await _report(url, asked | at_once | {"seed": next(seeds)})).summary
            name = f"{each}, {number} at once"
            yield Row(name, "output tokens/s", done.output_tokens_per_second, more_is_better=True)
            yield Row(name, "time per token, p50, ms", _of(done.tpot_ms).p50)
            highest = max(highest, done.requests_per_minute / 60)
        for share in loads.shares:
            for row in await arriving(f"{each}, at {share:g} of its highest rate", share * highest):
                yield row


def rows_of(name: str, report: Report) -> list[Row]:
    """The figures of a load whose requests arrive by themselves."""
    done, bounds = report.summary, Objectives(report.options.ttft_slo_ms, report.options.tpot_slo_ms)
    ttft_ms, itl_ms, fifth = _of(done.ttft_ms), _of(done.itl_ms), -(-len(report.records) // FIFTH)
    first, last = (summarize(part, bounds) for part in (report.records[:fifth], report.records[-fifth:]))
    return [
        Row(name, "answered a second", done.requests_per_minute / 60, more_is_better=True),
        Row(name, "good, %", 100 * done.goodput.share, more_is_better=True),
        Row(name, "good of the first fifth, %", 100 * first.goodput.share, more_is_better=True),
        Row(name, "good of the last fifth, %", 100 * last.goodput.share, more_is_better=True),
        Row(name, "TTFT, p50, ms", ttft_ms.p50),
        Row(name, "TTFT, p99, ms", ttft_ms.p99),
        Row(name, "time per token, p50, ms", _of(done.tpot_ms).p50),
        Row(name, "time per token of the first fifth, p50, ms", _of(first.tpot_ms).p50),
        Row(name, "time per token of the last fifth, p50, ms", _of(last.tpot_ms).p50),
        Row(name, "between tokens, p50, ms", itl_ms.p50),
        Row(name, "between tokens, p99, ms", itl_ms.p99),
        Row(name, "between tokens, p99 over p50", itl_ms.p99 / itl_ms.p50),
    ]


async def _report(url: str, options: dict[str, object]) -> Report:
    """Raises EndpointUnavailable if a request fails: rates of what is left would flatter the server."""
    report = await load(LoadOptions.model_validate({"url": url, "api": "completions"} | options))
    summary = report.summary
    if summary.errors:
        raise EndpointUnavailable(f"{url}: {summary.completed} of {summary.requests} answered: {summary.errors}")
    return report


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
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 16, 64, 256])
    default = [Lengths(1000, 300), Lengths(4000, 300)]
    parser.add_argument("--lengths", type=Lengths.parse, nargs="+", default=default, metavar="PROMPT/ANSWER")
    parser.add_argument("--rounds", type=int, default=4, help="requests of each stream, one after another")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.5], help="of the streams' highest rate")
    parser.add_argument("--rates", type=float, nargs="*", default=[], help="requests a second")
    parser.add_argument("--requests", type=int, default=120, help="requests at each of these shares and rates")
    parser.add_argument("--ttft-ms", type=float, default=SEARCH_TTFT_MS, help="until a good request's first token")
    parser.add_argument("--tpot-ms", type=float, default=SEARCH_TPOT_MS, help="from each of its tokens to the next")
    vocabulary = "ids of the prompts' tokens are below it: a size that all the servers' models have"
    parser.add_argument("--vocabulary", type=int, default=32000, help=vocabulary)
    parser.add_argument("--out", type=Path, default=Path("out"))
    given = parser.parse_args()
    console = Console(width=200)
    if given.shares and not given.streams:
        parser.error("--shares are of the rate that --streams reach: give some, or --rates alone with --shares empty")
    loads = Loads(
        given.streams, given.lengths, given.rounds, given.shares, given.rates, given.requests, given.ttft_ms,
        given.tpot_ms, given.vocabulary,
    )  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    # Who ends this command, `timeout` for one, ends the server too, which would otherwise keep its GPUs.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        table = asyncio.run(compare(given.server, loads, given.out, console))
    except EndpointUnavailable as error:
        parser.exit(1, f"{error}\n")
    console.print(table)


if __name__ == "__main__":
    main()
