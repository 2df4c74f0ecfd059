"""How many tokens a second one path carries at most, and how much later its tokens come."""

import asyncio
import time
from dataclasses import dataclass

from bench.gateway_relay.paths import TokenPath
from bench.gateway_relay.step_clock import added_latencies
from bench.meshes.processes import CpuMeter
from loadgen.summary import Distribution, distribution

# By then sources write at full speed (see `Settling`), and the queues between the processes are full.
SETTLE_SECONDS = 3.0
# Steps are recorded for longer than tokens are measured, so that every token finds its step.
MARGIN_SECONDS = 0.5


@dataclass(frozen=True)
class Saturation:
    """`cores`: how many cores each process used during the measurement, the client included. `subject`: the process
    under test.
    """

    subject: str
    tokens_per_second: float
    messages_per_second: float
    cores: dict[str, float]

    @property
    def tokens_per_core_second(self) -> float:
        """Tokens for each second of processor time that the process under test used."""
        return self.tokens_per_second / self.cores[self.subject]


@dataclass(frozen=True)
class StepLatency:
    """Time from a step to its tokens' arrival at the client, over all streams."""

    tokens: int
    latency_ms: Distribution
    cores: dict[str, float]


async def saturation(path: TokenPath, streams: int, seconds: float) -> Saturation:
    async with path.read(path.endpoint, streams) as reading:
        await reading.all_started()
        await asyncio.sleep(SETTLE_SECONDS)
        meter, started = CpuMeter(path.process_ids), time.perf_counter()
        tokens, messages = reading.tokens, reading.messages
        await asyncio.sleep(seconds)
        elapsed = time.perf_counter() - started
        reading.check()
        rates = (reading.tokens - tokens) / elapsed, (reading.messages - messages) / elapsed
        return Saturation(path.subject, *rates, meter.cores())


async def step_latency(path: TokenPath, streams: int, seconds: float, hop_ms: float = 0.0) -> StepLatency:
    """hop_ms: a message's time from source to client, for a path whose steps are known only by a message's arrival."""
    assert path.steps is not None
    async with path.steps() as steps, path.read(path.endpoint, streams) as reading:
        await reading.all_started()
        await asyncio.sleep(SETTLE_SECONDS)
        meter, began = CpuMeter(path.process_ids), time.perf_counter()
        await asyncio.sleep(seconds)
        ended = time.perf_counter()
        cores = meter.cores()
        await asyncio.sleep(MARGIN_SECONDS)
        reading.check()
        measured = [[at for at in times if began <= at < ended] for times in reading.times]
        latencies = [latency for times in measured for latency in added_latencies(times, steps)]
    late_s = hop_ms / 1000 if path.steps_one_hop_late else 0.0
    values = distribution([latency + late_s for latency in latencies])
    assert values is not None
    return StepLatency(len(latencies), values, cores)
