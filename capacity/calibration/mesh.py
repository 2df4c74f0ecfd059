"""Measures the cost file of a running mesh: closed loops of several widths and prompts of several lengths."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from capacity.calibration.fit import left_out_error, prompt_times
from capacity.calibration.sparse import sparse_pairs_ms, sparse_prompt_tokens
from capacity.calibration.transfers import transfer_rates
from capacity.calibration.workers import workers_of
from loadgen.options import LoadOptions
from loadgen.records import RequestRecord
from loadgen.run import load
from mesh.cost_file import CostFile
from mesh.costs import MILLION, CostModel
from mesh.errors import ConfigError
from mesh.rpc.channel import Channels

WIDTHS = (1, 2, 4, 8, 16, 32)
PROMPTS = (64, 512, 1024, 2048, 3072)
OUTPUT_TOKENS = 48
# Tokens of prompts in the closed loops: few, so that prompts hardly lengthen the steps of other requests.
SHORT_PROMPT = 16
PROMPTS_A_LENGTH = 5
SPARSE_PROMPTS = 2
# Workers report what they measured within this many seconds.
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
    # host:port of its scheduler, and channels to it. If None, rates of transfers and of sparse prompts keep their
    # defaults.
    scheduler: tuple[str, Channels] | None = None
    # Prompts are drawn from this. No two calibrations may send the same prompts, because the mesh caches their KV.
    seed: int = field(default_factory=lambda: secrets.randbelow(SEEDS))


async def costs_of_mesh(mesh: MeshUnderTest, show: Callable[[str], None]) -> CostFile:
    """Raises ConfigError if the mesh answers with errors, MeshError if it does not answer."""
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
    """What workers have measured themselves, as fields of a cost model: their transfers, and sparse prompts, some of
    which this function sends them. token_ms: time of a prompt's token without attention to earlier ones.
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
    """The median step while each decode worker has `width` requests."""
    streams = width * mesh.decode_workers
    records = await _records(mesh, streams, 3 * streams, SHORT_PROMPT, OUTPUT_TOKENS)
    # Leave out the first and the last requests, which ran with fewer than `width`.
    middle = records[streams : 2 * streams]
    return 1000 * median(seconds for record in middle if (seconds := step_seconds(record)) is not None)


def step_seconds(record: RequestRecord) -> float | None:
    """Seconds per token after the second message; None if there is no such token.

    If a prefill worker computed the prompt, the second token comes more than a step after the first: the KV must be
    pushed first, and it lands while a step runs.
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
    """When each request was sent. All were due at once, and each waited for the one before."""
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
    """The points without falls: a step of more requests is never quicker, so that a fall is noise."""
    found: list[tuple[float, float]] = []
    for requests, ms in points:
        found.append((requests, max(ms, found[-1][1] if found else 0.0)))
    return tuple(found)


def measure(mesh: MeshUnderTest, show: Callable[[str], None]) -> CostFile:
    """`costs_of_mesh` on an event loop of its own."""
    return asyncio.run(costs_of_mesh(mesh, show))
