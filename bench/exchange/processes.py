"""Ranks of one host, each in a process of its own."""

import multiprocessing
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import DupFd
from typing import Any, TypeVar

import torch

# torch.distributed takes these names from here too.
from torch._C._distributed_c10d import PrefixStore, TCPStore

from engine.exchange.hosts import HostsExchange
from engine.exchange.peer import PeerExchange
from engine.exchange.rail import Rail
from engine.parallel.layout import Layout, Place
from engine.parallel.peers import GroupDescriptors, Peers

ResultT = TypeVar("ResultT")
# A rank waits for another rank's host for so long at most.
LIMIT_SECONDS = 60.0


@dataclass
class Rank:
    process: SpawnProcess
    _results: Connection

    def result(self) -> Any:
        """Raises RuntimeError if the rank has ended without one; its traceback is in its output."""
        try:
            return self._results.recv()
        except EOFError:
            raise RuntimeError("the rank has ended") from None
        finally:
            self.process.join(10)
            self.process.kill()


def start_ranks(layout: Layout, act: Callable[[Peers], ResultT]) -> list[Rank]:
    """Start a process for each rank, which calls `act`. act: must be picklable, such as a function of a module."""
    context = multiprocessing.get_context("spawn")
    # They exchange tensors only, for which hosts need no line.
    lines = [None] if layout.hosts == 1 else [each.detach() for each in _sockets(layout.hosts)]
    hosts = [GroupDescriptors.create(layout.ranks_a_host, line) for line in lines]
    ranks = []
    for rank in range(layout.world):
        results, theirs = context.Pipe(duplex=False)
        descriptors = hosts[Place(layout, rank).host]
        line = None if descriptors.line is None else DupFd(descriptors.line)
        shared = [DupFd(descriptor) for descriptor in (descriptors.memory, *descriptors.wakeups)]
        process = context.Process(target=_run, args=(layout, rank, shared, line, act, theirs), daemon=True)
        process.start()
        theirs.close()
        ranks.append(Rank(process, results))
    for descriptors in hosts:
        descriptors.close()
    return ranks


def on_each_rank(layout: Layout, act: Callable[[Peers], ResultT]) -> list[ResultT]:
    """Call `act` on each rank; returns the results by rank. Raises RuntimeError if a rank ends without a result."""
    ranks = start_ranks(layout, act)
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(Rank.result, ranks))


def on_each_gpu(layout: Layout, act: Callable[[PeerExchange], ResultT]) -> list[ResultT]:
    """As `on_each_rank`, for ranks that have a GPU each and exchange tensors."""
    return on_each_rank(layout, partial(exchanging, act))


def exchanging(act: Callable[[PeerExchange], ResultT], peers: Peers) -> ResultT:
    device = torch.device("cuda", peers.place.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return act(PeerExchange(peers, device))


def on_gpus_of_hosts(layout: Layout, port: int, act: Callable[[HostsExchange], ResultT]) -> list[ResultT]:
    """As `on_each_gpu`, for ranks of several hosts, which are this one. They find each other at `port`."""
    return on_each_rank(layout, partial(_exchanging_over_hosts, act, port))


def _exchanging_over_hosts(act: Callable[[HostsExchange], ResultT], port: int, peers: Peers) -> ResultT:
    place, number = peers.in_worker, peers.place.rank
    device = torch.device("cuda", place.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    first = TCPStore("127.0.0.1", port, is_master=place.rank == 0)
    store = PrefixStore(f"rail {number}", first)
    rail = Rail(store, place.host, place.layout.hosts, device, LIMIT_SECONDS)
    return act(HostsExchange(place, PeerExchange(peers, device), rail, device))


def _sockets(hosts: int) -> list[socket.socket]:
    return [end for _ in range(-(-hosts // 2)) for end in socket.socketpair()][:hosts]


def _run(
    layout: Layout,
    rank: int,
    shared: list[Any],
    line: Any,
    act: Callable[[Peers], object],
    results: Connection,
) -> None:
    memory, *wakeups = (descriptor.detach() for descriptor in shared)
    descriptors = GroupDescriptors(memory, wakeups, line and line.detach())
    peers = Peers(Place(layout, rank), descriptors, LIMIT_SECONDS)
    results.send(act(peers))
