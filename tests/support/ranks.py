"""One rank in a process of its own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine.config import EngineConfig
from engine.protocol.messages import StepResult
from tests.support.engines import Transcript
from worker.rank_client import RankClient


@asynccontextmanager
async def running_rank(config: EngineConfig) -> AsyncIterator[RankClient]:
    client = await RankClient.start(config)
    try:
        yield client
    finally:
        await client.close(grace_seconds=2.0)


async def until_an_end(client: RankClient) -> Transcript:
    """What it says until a request has ended."""
    transcript = Transcript()
    async for message in client.results:
        assert isinstance(message, StepResult)
        transcript.record(message)
        if transcript.ends:
            return transcript
    raise AssertionError("the rank has gone")
