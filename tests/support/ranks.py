"""Ranks in processes of their own."""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from engine.config import EngineConfig
from engine.protocol.messages import StepResult
from tests.support.engines import Transcript
from tests.support.forking import forked_services
from transfer.block_macs import Authorship
from worker.ranks.client import RankClient
from worker.ranks.group import RankGroup


@asynccontextmanager
async def running_rank(config: EngineConfig, authorship: Authorship | None = None) -> AsyncIterator[RankClient]:
    with forked_services():
        client = await RankClient.start(config, authorship=authorship)
    try:
        yield client
    finally:
        await client.close(grace_seconds=30.0)


async def until_an_end(client: RankClient) -> Transcript:
    """The rank's outputs until a request has ended."""
    transcript = Transcript()
    async for message in client.results:
        assert isinstance(message, StepResult)
        transcript.record(message)
        if transcript.ends:
            return transcript
    raise AssertionError("the rank has gone")


@contextmanager
def frozen(ranks: RankGroup) -> Iterator[None]:
    """Stop the processes of a worker's ranks during this block."""
    for rank in ranks.ranks:
        os.kill(rank.process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        for rank in ranks.ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.process_id, signal.SIGCONT)
