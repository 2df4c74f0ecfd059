"""A cost file of a mesh that runs: closed loops of several widths through its gateway, prompts of several lengths."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from bench.calibration.fit import left_out_error, prompt_times
from bench.calibration.sparse import sparse_pairs_ms, sparse_prompt_tokens
from bench.calibration.transfers import transfer_rates
from bench.calibration.workers import workers_of
from bench.load.options import LoadOptions
from bench.load.records import RequestRecord
from bench.load.run import load
from mesh.channel import Channels
from mesh.costs import MILLION, CostFile, CostModel
from mesh.errors import ConfigError

WIDTHS = (1, 2, 4, 8, 16, 32)
PROMPTS = (64, 512, 1024, 2048, 3072)
OUTPUT_TOKENS = 48
# Prompts of the closed loops: short, so that they hardly lengthen the steps of others.
SHORT_PROMPT = 16
PROMPTS_A_LENGTH = 5
SPARSE_PROMPTS = 2
# Workers report within it what they measured.
REPORT_SECONDS = 2.0
SEEDS = 2**40


@dataclass(frozen=True)
class MeshUnderTest:
    """A gateway, and how many decode workers share its load."""

    gateway: str
    decode_workers: int
    widths: Sequence[int] = WIDTHS
    prompts: Sequence[int] = PROMPTS
    api_key: str | None = None
    # host:port of its scheduler, and channels to it; None leaves rates of transfers and sparse prompts as they
    # are by default.
    scheduler: tuple[str, Channels] | None = None
    # Prompts are drawn from it. No two calibrations may send the same ones: the mesh keeps the KV of what it computed.
    seed: int = field(default_factory=lambda: secrets.randbelow(SEEDS))


async def costs_of_mesh(mesh: MeshUnderTest, show: Callable[[str], None]) -> CostFile:
    """Raises ConfigError where the mesh answers with errors, MeshError where it does not answer."""
    steps = []
    for width in mesh.widths:
        ms = await _step_ms(mesh, width)
        show(f"{width} requests on each decode worker: {ms:.2f} ms a token")
        steps.append((float(width), ms))
    firsts = []
    for tokens in mesh.prompts:
        ms = await _first_token_ms(mesh, tokens)
        show(f"prompts of {tokens} tokens: first token after {ms:.1f} ms")
        firsts.append((float(tokens), ms))
    rising = _rising(steps)
    start_ms, token_ms, pair_ms = prompt_times(firsts)
    reported = {} if mesh.scheduler is None else await _reported(mesh, *mesh.scheduler, token_ms, show)
    costs = CostModel(
        decode_steps=rising,
        prefill_tokens_per_second=1000 / token_ms,
        prefill_pairs_ms=pair_ms * MILLION,
        request_ms=start_ms,
        **reported,
    )
    workers = "1 decode worker" if mesh.decode_workers == 1 else f"{mesh.decode_workers} decode workers"
    source = f"a mesh of {workers}, through its gateway"
    return CostFile(costs, source=source, error=left_out_error(rising))


async def _reported(
    mesh: MeshUnderTest, scheduler: str, channels: Channels, token_ms: float, show: Callable[[str], None]
) -> dict[str, float]:
    """What workers measured themselves, as fields of a cost model: transfers of their traffic, and sparse prompts,
    of which they are sent some. token_ms: a prompt's token without what came before it.
    """
    workers = await workers_of(scheduler, channels)
    reported = transfer_rates(workers, show)
    tokens = sparse_prompt_tokens(workers)
    if tokens is None:
        return reported
    await _records(mesh, mesh.decode_workers, SPARSE_PROMPTS * mesh.decode_workers, tokens, 1)
    await asyncio.sleep(REPORT_SECONDS)
    pairs_ms = sparse_pairs_ms(await workers_of(scheduler, channels), token_ms)
    if pairs_ms is None:
        show(f"sparse prompts: not measured, since no worker computed any of {tokens} tokens")
        return reported
    show(f"sparse prompts of {tokens} tokens: {pairs_ms:.2f} ms for a million pairs")
    return {**reported, "sparse_pairs_ms": pairs_ms}


async def _step_ms(mesh: MeshUnderTest, width: int) -> float:
    """The median step of requests that keep `width` of them on each decode worker."""
    streams = width * mesh.decode_workers
    records = await _records(mesh, streams, 3 * streams, SHORT_PROMPT, OUTPUT_TOKENS)
    # The first and the last ones had fewer beside them.
    middle = records[streams : 2 * streams]
    return 1000 * median(seconds for record in middle if (seconds := step_seconds(record)) is not None)


def step_seconds(record: RequestRecord) -> float | None:
    """Time of each token after the second message; None if there is none.

    The second token of a prompt that a prefill worker computed came later than a step after the first: its KV was
    pushed, and landed while a step ran.
    """
    times, tokens = record.message_times_s[1:], sum(record.message_tokens[2:])
    return (times[-1] - times[0]) / tokens if tokens else None


async def _first_token_ms(mesh: MeshUnderTest, tokens: int) -> float:
    records = await _records(mesh, 1, PROMPTS_A_LENGTH, tokens, 1)
    return 1000 * median(
        record.message_times_s[0] - started
        for record, started in zip(records, _starts(records), strict=True)
        if record.message_times_s
    )


def _starts(records: Sequence[RequestRecord]) -> list[float]:
    """When each of a row of requests was sent: all were due at once, and each waited for the one before."""
    return [0.0, *(record.finished_s or 0.0 for record in records[:-1])]


async def _records(
    mesh: MeshUnderTest, streams: int, requests: int, prompt_tokens: int, output_tokens: int
) -> list[RequestRecord]:
    options = LoadOptions(
        grpc=mesh.gateway,
        api_key=mesh.api_key,
        rate=float("inf"),
        requests=requests,
        max_concurrency=streams,
        isl=prompt_tokens,
        osl=output_tokens,
        seed=mesh.seed + prompt_tokens * 1000 + streams,
    )
    records = (await load(options)).records
    failed = next((record for record in records if not record.completed), None)
    if failed is not None:
        raise ConfigError(f"the mesh answered with {failed.error}: {failed.error_message}")
    return records


def _rising(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """No wider step is quicker: what looks so is noise."""
    found: list[tuple[float, float]] = []
    for requests, ms in points:
        found.append((requests, max(ms, found[-1][1] if found else 0.0)))
    return tuple(found)


def measure(mesh: MeshUnderTest, show: Callable[[str], None]) -> CostFile:
    """`costs_of_mesh` on an event loop of its own."""
    return asyncio.run(costs_of_mesh(mesh, show))
