"""Starts a worker's ranks, or takes over those that an earlier worker kept: all of them, or none."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from engine.config import EngineConfig
from engine.parallel.peers import GroupDescriptors
from mesh.config import ObserveConfig
from mesh.errors import MeshError
from transfer.block_macs import Authorship
from worker.handover import KeptRanks
from worker.hosts.joined import JoinedHosts
from worker.hosts.rendezvous import HostsRendezvous
from worker.ranks.client import RankClient


@asynccontextmanager
async def started_ranks(
    config: EngineConfig, observe: ObserveConfig | None, authorship: Authorship | None, hosts: JoinedHosts | None
) -> AsyncIterator[Sequence[RankClient]]:
    """Clients of all ranks of the worker, in order, once all have loaded. If one does not, or if the block raises, all
    end. Raises what RankClient.start raises.

    hosts: the worker's other hosts, if there are any; all must have joined.
    """
    ranks, ranks_a_host = config.parallel.world, config.parallel.ranks_a_host
    if hosts is None:
        shared = GroupDescriptors.create(ranks_a_host) if ranks > 1 else None
    else:
        shared = await hosts.open_group()
    rendezvous = HostsRendezvous()
    try:
        own = [
            RankClient.start(config, observe, rank, _name(rank, config, hosts), shared, authorship, rendezvous)
            for rank in range(ranks_a_host)
        ]
        async with _all_or_none(config, own, hosts, rendezvous) as clients:
            yield clients
    finally:
        if shared is not None:
            shared.close()


@asynccontextmanager
async def adopted_ranks(
    kept: KeptRanks,
    config: EngineConfig,
    observe: ObserveConfig | None,
    authorship: Authorship | None,
    hosts: JoinedHosts | None,
) -> AsyncIterator[Sequence[RankClient]]:
    """As `started_ranks`, with the released ranks of a worker, or of its first host. Raises what RankClient.adopt
    raises.
    """
    if hosts is not None:
        assert kept.group is not None
        await hosts.take_group(kept.group)
    rendezvous = HostsRendezvous()
    own = [
        RankClient.adopt(handle, config, observe, rank, _name(rank, config, hosts), authorship, rendezvous)
        for rank, handle in enumerate(kept.ranks)
    ]
    async with _all_or_none(config, own, hosts, rendezvous) as clients:
        yield clients


@asynccontextmanager
async def _all_or_none(
    config: EngineConfig,
    own: Sequence[Coroutine[Any, Any, RankClient]],
    hosts: JoinedHosts | None,
    rendezvous: HostsRendezvous,
) -> AsyncIterator[Sequence[RankClient]]:
    """own: clients of this host's ranks."""
    others = [
        RankClient.reach(each, _name(rank, config, hosts), rendezvous)
        for rank, each in enumerate([] if hosts is None else hosts.ranks, start=len(own))
    ]
    starts = [asyncio.create_task(client) for client in (*own, *others)]
    started = False
    try:
        yield await asyncio.gather(*starts)
        started = True
    except MeshError:
        _let_go(starts, len(own), hosts)
        raise
    finally:
        if not started:
            await _undo(starts)


def _name(rank: int, config: EngineConfig, hosts: JoinedHosts | None) -> str:
    parallel = config.parallel
    if parallel.world == 1:
        return "the engine process"
    name = f"rank {rank} of {parallel.world}"
    return name if hosts is None else f"{name} (host {hosts.number_of(rank // parallel.ranks_a_host)})"


def _let_go(starts: Sequence[asyncio.Task[RankClient]], own: int, hosts: JoinedHosts | None) -> None:
    """After a rank did not start, tell which one if it was another host's, and let all other hosts go: they can keep
    theirs. own: how many of `starts` are of this host.
    """
    if hosts is None:
        return
    failed = [rank for rank, each in enumerate(starts) if each.done() and each.exception() is not None]
    if failed and failed[0] >= own:
        hosts.not_started(failed[0] - own)
    # Before all ranks that this host reaches are ended.
    hosts.dismiss()


async def _undo(starts: Sequence[asyncio.Task[RankClient]]) -> None:
    """End the ranks, both those still loading and those that have loaded."""
    for start in starts:
        start.cancel()
    ended = await asyncio.gather(*starts, return_exceptions=True)
    await asyncio.gather(*(each.close(grace_seconds=0) for each in ended if isinstance(each, RankClient)))
