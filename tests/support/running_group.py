"""A worker's ranks in processes of their own, and their messages."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from engine.config import EngineConfig
from engine.protocol.messages import StepResult
from tests.support.engines import Transcript, submit_of
from tests.support.forking import forked_services
from worker.ranks.group import RankGroup, RankMessage


@asynccontextmanager
async def running_group(config: EngineConfig) -> AsyncIterator[tuple[RankGroup, Transcript]]:
    with forked_services():
        group, transcript = await RankGroup.start(config), Transcript()

    def on_message(rank: int, message: RankMessage) -> None:
        assert isinstance(message, StepResult)
        transcript.record(message)

    reading = asyncio.create_task(group.run(on_message))
    try:
        yield group, transcript
    finally:
        reading.cancel()
        await group.close(grace_seconds=30.0)


def submit_to(group: RankGroup, prompt: Sequence[int], tokens: int) -> int:
    """Submit a request that ends after this many tokens; returns its key."""
    key = group.new_key(prompt, b"", computes_prompt=True)
    group.submit(submit_of(key, prompt, tokens, ignore_eos=True))
    return key
