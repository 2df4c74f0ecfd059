"""What one path carries at the most, and how much later its tokens come."""

import asyncio
import time
from dataclasses import dataclass

from bench.gateway_relay.paths import TokenPath
from bench.gateway_relay.step_clock import added_latencies
from bench.load.summary import Distribution, distribution
from bench.meshes.processes import CpuMeter

# Wait until the sources have stopped going slowly, and the queues between the processes have filled.
SETTLE_SECONDS = 3.0
# More steps are recorded than are measured, so that every token finds its own.
MARGIN_SECONDS = 0.5


@dataclass(frozen=True)
class Saturation:
    """`cores` in use by each process over the measurement, the client's among them; `subject` is under test."""

    subject: str
    tokens_per_second: float
    messages_per_second: float
    cores: dict[str, float]

    @property
    def tokens_per_core_second(self) -> float:
        """What the process under test would carry with a core to itself, by the processor time it used."""
        return self.tokens_per_second / self.cores[self.subject]


@dataclass(frozen=True)
class StepLatency:
    """From a step to its tokens' arrival at the client, over all streams."""

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
    """`hop_ms` is what one message takes from source to client, for a path whose steps are told by arriving."""
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
