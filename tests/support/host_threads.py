"""Ranks of one worker on several hosts, as threads of the test: each host with memory of its own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch._C._distributed_c10d import HashStore

from engine.exchange.host import HostExchange
from engine.exchange.hosts import HostsExchange
from engine.exchange.rail import Rail
from engine.parallel.layout import Layout, Place
from engine.parallel.peers import GroupDescriptors, Peers

ResultT = TypeVar("ResultT")
CPU = torch.device("cpu")


def on_each_rank_of_hosts(layout: Layout, act: Callable[[HostsExchange], ResultT]) -> list[ResultT]:
    """What each rank makes of it, by rank; a rank leaves when it has. Raises what the first of them raises."""
    descriptors = [GroupDescriptors.create(layout.ranks_a_host) for _ in range(layout.hosts)]
    stores = [HashStore() for _ in range(layout.ranks_a_host)]

    def run(rank: int) -> ResultT:
        place = Place(layout, rank)
        peers = Peers(place.on_host, descriptors[place.host], 60.0)
        try:
            rail = Rail(stores[place.on_host.rank], place.host, layout.hosts, CPU, 60.0)
            return act(HostsExchange(place, HostExchange(peers), rail, CPU))
        finally:
            peers.close()

    try:
        with ThreadPoolExecutor(layout.world) as pool:
            return list(pool.map(run, range(layout.world)))
    finally:
        for each in descriptors:
            each.close()
