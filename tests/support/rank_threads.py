"""Ranks of one worker as threads of the test."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.parallel.layout import Layout, Place
from engine.parallel.peers import GroupDescriptors, Peers

ResultT = TypeVar("ResultT")


def on_each_rank(layout: Layout, act: Callable[[Peers], ResultT], limit_seconds: float = 20.0) -> list[ResultT]:
    """What each rank makes of it, by rank; a rank leaves when it has. Raises what the first of them raises."""
    descriptors = GroupDescriptors.create(layout.world)

    def run(rank: int) -> ResultT:
        peers = Peers(Place(layout, rank), descriptors, limit_seconds)
        try:
            return act(peers)
        finally:
            peers.close()

    try:
        with ThreadPoolExecutor(layout.world) as pool:
            return list(pool.map(run, range(layout.world)))
    finally:
        descriptors.close()
