import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gateway_relay.relay import serve_relay
from bench.gateway_relay.step_clock import added_latencies, source_steps
from bench.gateway_relay.token_source import serve_tokens
from bench.gateway_relay.token_streams import GrpcStreams
from mesh.errors import EndpointUnavailable
from mesh.ports import free_port
from mesh.rpc.channel import Channels
from tests.support.waiting import PATIENCE_SECONDS, eventually

# A token later than half of it would be taken for the next step's.
PACE_MS = 50.0


@asynccontextmanager
async def running(port: int, server: Coroutine[Any, Any, None]) -> AsyncIterator[str]:
    task = asyncio.create_task(server)
    endpoint = f"127.0.0.1:{port}"
    async with Channels().open(endpoint) as channel, asyncio.timeout(PATIENCE_SECONDS):
        await channel.channel_ready()
    try:
        yield endpoint
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def source(pace_ms: float) -> AsyncIterator[str]:
    port = free_port()
    async with running(port, serve_tokens(port, pace_ms)) as endpoint:
        yield endpoint


@given(st.lists(st.floats(0, 0.02), min_size=5, max_size=40), st.integers(0, 20))
def test_a_token_counts_from_its_own_step(latencies: list[float], first_step: int) -> None:
    steps = [0.05 * index for index in range(first_step + len(latencies) + 3)]
    tokens = [steps[first_step + index] + latency for index, latency in enumerate(latencies)]
    assert added_latencies(tokens, steps) == pytest.approx(latencies)


def test_a_late_token_counts_from_its_own_step() -> None:
    steps = [0.0, 0.05, 0.10, 0.15, 0.20]
    tokens = [0.001, 0.051, 0.170, 0.171, 0.201]
    assert added_latencies(tokens, steps) == pytest.approx([0.001, 0.001, 0.070, 0.021, 0.001])


def test_tokens_without_a_known_step_are_dropped() -> None:
    assert added_latencies([0.001, 0.051, 0.101, 0.151], [0.05, 0.10]) == pytest.approx([0.001, 0.001])


async def latencies_of(endpoint: str, since: float) -> list[float]:
    """How late tokens of three streams come, by the steps of a paced source that made none before `since`."""
    async with source_steps(endpoint) as steps, GrpcStreams(endpoint, 3) as streams:
        await streams.all_started()
        await eventually(lambda: all(len(times) >= 10 for times in streams.times))
        streams.check()
        seen = [list(times) for times in streams.times]
        # Steps of those tokens may be told a moment later than the tokens themselves.
        await eventually(lambda: bool(steps) and steps[-1] > max(map(max, seen)))
        assert since < steps[0] < time.perf_counter()
        return [latency for times in seen for latency in added_latencies(times, steps)]


async def test_a_paced_source_gives_tokens_with_their_instants() -> None:
    since = time.perf_counter()

    async def right() -> bool:
        latencies = await latencies_of(endpoint, since)
        return len(latencies) > 15 and min(latencies) > 0

    async with source(PACE_MS) as endpoint:
        # Once more, if the machine is so busy that most tokens of a stream come later than half of the pace.
        await eventually(right)


async def test_the_relay_forwards_every_message_unchanged() -> None:
    port = free_port()
    async with (
        source(PACE_MS) as upstream,
        running(port, serve_relay(port, upstream)) as relay,
        source_steps(upstream) as direct,
        source_steps(relay) as relayed,
    ):
        await eventually(lambda: len(relayed) > 8 and bool(direct) and direct[-1] >= relayed[7])
    assert set(relayed[1:8]) <= set(direct)


async def test_streams_that_nobody_answers_are_an_error() -> None:
    async with GrpcStreams(f"127.0.0.1:{free_port()}", 1) as streams:
        with pytest.raises(Exception, match="connect") as raised:
            await streams.all_started()
    assert not isinstance(raised.value, EndpointUnavailable)
