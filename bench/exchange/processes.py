"""Ranks of one host, each in a process of its own."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import DupFd
from typing import Any, TypeVar

import torch

from engine.exchange.peer import PeerExchange
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
    descriptors = GroupDescriptors.create(layout.world)
    ranks = []
    for rank in range(layout.world):
        results, theirs = context.Pipe(duplex=False)
        shared = [DupFd(descriptor) for descriptor in (descriptors.memory, *descriptors.wakeups)]
        process = context.Process(target=_run, args=(layout, rank, shared, act, theirs), daemon=True)
        process.start()
        theirs.close()
        ranks.append(Rank(process, results))
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


def _run(layout: Layout, rank: int, shared: list[Any], act: Callable[[Peers], object], results: Connection) -> None:
    memory, *wakeups = (descriptor.detach() for descriptor in shared)
    peers = Peers(Place(layout, rank), GroupDescriptors(memory, wakeups), LIMIT_SECONDS)
    results.send(act(peers))
