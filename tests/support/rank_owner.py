"""A service that starts a rank, prints the rank's process id, and waits to be killed: `python rank_owner.py`."""

import asyncio

from engine.config import EngineConfig
from worker.ranks.client import RankClient


async def own() -> None:
    client = await RankClient.start(EngineConfig(backend="oracle"))
    print(client.process_id, flush=True)  # noqa: T201
    await asyncio.shield(client.closed)


if __name__ == "__main__":
    asyncio.run(own())
