"""Ranks of one worker as threads of the test. The ranks of each host share memory of their own."""

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.parallel.layout import Layout, Place
from engine.parallel.peers import GroupDescriptors, Peers
from mesh.errors import RankLost

ResultT = TypeVar("ResultT")


def on_each_rank(layout: Layout, act: Callable[[Peers], ResultT], limit_seconds: float = 60.0) -> list[ResultT]:
    """Call `act` on each rank; returns the results by rank. A rank leaves its peers when `act` returns. Raises the
    first rank's error, or that of a rank which the others only lost. The limit has room for a busy machine.
    """
    descriptors = [GroupDescriptors.create(layout.ranks_a_host, line) for line in _lines(layout.hosts)]

    def run(rank: int) -> ResultT:
        place = Place(layout, rank)
        peers = Peers(place, descriptors[place.host], limit_seconds)
        try:
            return act(peers)
        finally:
            peers.close()

    try:
        with ThreadPoolExecutor(layout.world) as pool:
            ranks = [pool.submit(run, rank) for rank in range(layout.world)]
        errors = [error for rank in ranks if (error := rank.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, RankLost)), errors[0])
        return [rank.result() for rank in ranks]
    finally:
        for each in descriptors:
            each.close()


def _lines(hosts: int) -> Sequence[int | None]:
    """A connection for each host. With more than two hosts ranks can only exchange tensors, which needs no
    connection.
    """
    if hosts == 1:
        return [None]
    pairs = [socket.socketpair() for _ in range(hosts // 2 + hosts % 2)]
    return [end.detach() for pair in pairs for end in pair][:hosts]
