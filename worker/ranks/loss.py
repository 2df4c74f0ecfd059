"""What becomes of a worker's ranks when one of them is lost: which end, and which are kept for another group."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from mesh.errors import EngineFailed
from worker.handover import KeptRanks, RankHandle
from worker.hosts.host_group import LEAVE_SECONDS
from worker.hosts.joined import JoinedHosts
from worker.ranks.client import RankClient

_log = logging.getLogger("deepmesh.worker")


async def settle_loss(processes: Sequence[RankClient], hosts: JoinedHosts | None, lost: int | None) -> KeptRanks | None:
    """Kill the ranks of the host that was lost, and let the other hosts go. Returns this host's ranks once they have
    left the group, or None after killing them: if it is this host that was lost, or if one cannot leave.

    processes: all ranks of the worker, in order, whose results must be read meanwhile; hosts: the other hosts, if there
    are any; lost: the number of the rank that was lost; None if one hangs, and it is not known which. Then it cannot
    leave, and its host ends; all of them can if hosts do not reach each other.
    """
    size = len(processes) if hosts is None else hosts.ranks_a_host
    own, kept = processes[:size], None
    if lost is not None:
        first = lost // size * size
        for process in processes[first : first + size]:
            process.kill()
    if hosts is not None:
        hosts.dismiss()
        if lost not in range(size) and all(process.ready.can_regroup for process in own):
            kept = await _keep(own, hosts)
    if kept is None:
        for process in own:
            process.kill()
    return kept


async def release_all(processes: Sequence[RankClient]) -> list[RankHandle]:
    """Have all ranks forget all but their weights. Raises EngineFailed if one ends instead."""
    return await asyncio.gather(*(process.release() for process in processes))


async def _keep(own: Sequence[RankClient], hosts: JoinedHosts) -> KeptRanks | None:
    try:
        async with asyncio.timeout(LEAVE_SECONDS):
            return KeptRanks(*await hosts.break_up(partial(release_all, own)))
    except (TimeoutError, EngineFailed) as error:
        fields = {"cause": str(error) or f"one has not left its group within {LEAVE_SECONDS:g} s"}
        _log.warning("the ranks of this host cannot be kept", extra={"fields": fields})
        return None
