"""Ranks that find each other through values that another process keeps for them."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from engine.exchange.rail import Rail
from engine.exchange.store import AskedStore
from mesh.errors import RankLost
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


def test_a_wait_for_a_silent_host_ends_with_the_group() -> None:
    store, broken, over = HashStore(), threading.Event(), threading.Event()

    def act(rank: int) -> None:
        rail = Rail(store, rank, 2, torch.device("cpu"), 60.0, broken.is_set)
        part = torch.tensor(float(rank))
        assert rail.begin_gather(part).finish().tolist() == [0.0, 1.0]
        if rank == 0:
            try:
                begun = rail.begin_gather(part)
                broken.set()
                with pytest.raises(RankLost, match="broken up"):
                    begun.finish()
            finally:
                over.set()
        else:
            over.wait(60)
            # So that the first rank's call ends, for which its destructor waits.
            rail.begin_gather(part)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(act, range(2)))
