"""Ranks that find each other through values that another process keeps for them."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.exchange.rail import AskedStore, Rail
from worker.hosts.rendezvous import HostsRendezvous


def test_rails_with_one_rendezvous_connect_their_own_ranks() -> None:
    keeper, loop = HostsRendezvous(), asyncio.new_event_loop()
    keeping = threading.Thread(target=loop.run_forever)
    keeping.start()

    def publish(key: str, value: bytes) -> None:
        loop.call_soon_threadsafe(keeper.publish, key, value)

    def look_up(key: str) -> bytes:
        return asyncio.run_coroutine_threadsafe(keeper.look_up(key), loop).result(60)

    def act(rank: int) -> list[float]:
        host, number = divmod(rank, 2)
        rail = Rail(AskedStore(f"rail {number}", publish, look_up), host, 2, torch.device("cpu"), 60.0)
        gathered: list[float] = rail.begin_gather(torch.tensor(float(rank))).finish().tolist()
        return gathered

    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(act, range(4))) == [[0.0, 2.0], [1.0, 3.0]] * 2
    finally:
        loop.call_soon_threadsafe(loop.stop)
        keeping.join()
        loop.close()
