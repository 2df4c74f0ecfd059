"""The exchange of a CPU rank that is a thread of the test."""

import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from engine.exchange.host import HostExchange
from engine.exchange.hosts import HostsExchange
from engine.exchange.interface import RankExchange
from engine.exchange.rail import Rail
from engine.parallel.peers import Peers

CPU = torch.device("cpu")
LIMIT_SECONDS = 60.0


def exchange_of(peers: Peers, store: HashStore) -> RankExchange:
    """The rank's exchange. store: the same object for all ranks of the worker."""
    within, place = HostExchange(peers), peers.in_worker
    if place.layout.hosts == 1:
        return within
    rail = Rail(PrefixStore(str(peers.place.rank), store), place.host, place.layout.hosts, CPU, LIMIT_SECONDS)
    return HostsExchange(place, within, rail, CPU)
