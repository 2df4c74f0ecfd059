"""The worker's other hosts, as the first host's service sees them."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from engine.config import EngineConfig
from engine.parallel.peers import GroupDescriptors
from mesh.errors import ConfigError, EngineFailed, InvalidRequest, WorkerDraining
from mesh.observe import metrics
from worker.hosts.comparison import difference, own_version
from worker.hosts.host_group import GroupHandle, HostGroup
from worker.hosts.remote_rank import RemoteRank

RanksT = TypeVar("RanksT")

_log = logging.getLogger("deepmesh.worker")


@dataclass(frozen=True, slots=True)
class JoinedHost:
    """number: of the host; send_record: sends a record to its first rank; dismiss: has it join again later, once all
    that was sent to it has arrived.
    """

    number: int
    ranks: dict[int, RemoteRank]
    send_record: Callable[[bytes], None]
    dismiss: Callable[[], None]

    def lost(self) -> None:
        error = EngineFailed(f"the service of host {self.number} has ended, or cannot be reached")
        for rank in self.ranks.values():
            rank.lost(error)


class JoinedHosts:
    """Each host joins once. If one is lost after that, this host's ranks can be taken into another group, with other
    JoinedHosts. The worker may form without some hosts.

    Attributes:
        ranks_a_host: how many ranks each host has, this one too.
        stopping: set once a host has been told to stop after the worker has formed.
    """

    def __init__(self, engine: EngineConfig) -> None:
        """engine: the configuration that every host must have."""
        self._engine = engine
        self.ranks_a_host = engine.parallel.ranks_a_host
        self.stopping = asyncio.Event()
        self._hosts: dict[int, JoinedHost] = {}
        # Set whenever a host joins.
        self._changed = asyncio.Event()
        # Set once it is known with which hosts the worker forms.
        self._formed = asyncio.Event()
        # Whether a host's ranks did not start.
        self._failed = False
        # Hosts whose ranks do not start, and those that were lost meanwhile, as may happen once.
        self._left_out: set[int] = set()
        self._lost_once: set[int] = set()
        self._group: HostGroup | None = None
        self._carrying: asyncio.Task[None] | None = None

    def admit(self, number: int, engine: bytes, version: str) -> range:
        """Let a host join; returns the numbers of the ranks that it is to own. Call `joined` afterwards.

        engine: the host's configuration; version: of deepmesh there. Raises InvalidRequest, ConfigError,
        WorkerDraining.
        """
        parallel = self._engine.parallel
        if not 0 < number < parallel.hosts:
            raise InvalidRequest(f"host {number} joins a worker of {parallel.hosts}", field="join.host")
        if version != (ours := own_version()):
            raise ConfigError(
                f"host {number} has another version of deepmesh than the worker's first host:"
                f" {version or 'an older one'} there and {ours} here; install one version on all hosts of a worker"
            )
        try:
            theirs = json.loads(engine)
        except ValueError as error:
            raise InvalidRequest(f"host {number} names no configuration: {error}", field="join.engine") from error
        other = difference(self._engine.model_dump(mode="json"), theirs)
        if other is not None:
            raise ConfigError(f"host {number} is configured otherwise than the worker's first host: {other}")
        if number in self._hosts:
            raise WorkerDraining(f"host {number} of this worker has joined before")
        if self._formed.is_set() or number in self._left_out:
            raise WorkerDraining(f"this worker serves without host {number}: start its first host again to take it in")
        first = number * self.ranks_a_host
        return range(first, first + self.ranks_a_host)

    def joined(self, host: JoinedHost) -> None:
        self._hosts[host.number] = host
        fields = {"host": host.number, "missing": self._count_missing()}
        _log.info("a host has joined", extra={"fields": fields})
        if self._left_out.issuperset(self._missing):
            self._formed.set()
        self._changed.set()

    def left(self, host: JoinedHost) -> None:
        """The host has left, and its ranks are lost. If the worker has not formed yet, it may join again."""
        host.lost()
        if not self._formed.is_set() and self._hosts.get(host.number) is host:
            del self._hosts[host.number]
            self._count_missing()

    def told_to_stop(self, host: JoinedHost) -> None:
        """The host has been told to stop. A worker that has formed may have requests, and drains first."""
        if self._formed.is_set():
            self.stopping.set()
        else:
            host.dismiss()

    async def wait(self) -> int:
        """Return once it is known with which hosts the worker forms, and with how many, this one too: all, or after
        `missing_host_seconds` at least `least_hosts` of them.
        """
        parallel = self._engine.parallel
        self._count_missing()
        _log.info("waiting for the worker's other hosts", extra={"fields": {"hosts": parallel.hosts}})
        if parallel.least_hosts is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(parallel.missing_host_seconds):
                    await self._formed.wait()
            while not self._formed.is_set() and len(self._hosts) + 1 < parallel.least_hosts:
                self._changed.clear()
                await self._changed.wait()
            if self._missing:
                _log.warning("the worker forms without hosts", extra={"fields": {"missing": self._missing}})
            self._formed.set()
        await self._formed.wait()
        return len(self._hosts) + 1

    async def place_of(self, host: JoinedHost) -> tuple[int, int]:
        """The place of a host among those with which the worker forms, and how many these are."""
        if self._engine.parallel.least_hosts is None:
            return host.number, self._engine.parallel.hosts
        await self._formed.wait()
        return sorted((0, *self._hosts)).index(host.number), len(self._hosts) + 1

    def not_started(self, rank: int) -> None:
        """Called first if a rank did not start. rank: its place in `ranks`."""
        if self._engine.parallel.least_hosts is None:
            return
        self._failed = True
        number = self.number_of(1 + rank // self.ranks_a_host)
        if not self.ranks[rank].is_lost or number in self._lost_once:
            self._left_out.add(number)
        self._lost_once.add(number)

    def begin_again(self) -> bool:
        """After ranks did not start: wait for all hosts again, except those whose ranks did not. Returns whether the
        worker may form so: not if too few hosts are left, or if it was a rank of this host.
        """
        parallel = self._engine.parallel
        if not self._failed or parallel.hosts - len(self._left_out) < (parallel.least_hosts or 0):
            return False
        self.close()
        self._hosts, self._failed = {}, False
        self._formed.clear()
        self.stopping.clear()
        return True

    def number_of(self, place: int) -> int:
        """The number of the host that has this place."""
        return sorted((0, *self._hosts))[place]

    def _count_missing(self) -> int:
        missing = len(self._missing)
        metrics.WORKER_MISSING_HOSTS.set(missing)
        return missing

    @property
    def _missing(self) -> list[int]:
        return [number for number in range(1, self._engine.parallel.hosts) if number not in self._hosts]

    @property
    def ranks(self) -> Sequence[RemoteRank]:
        """The ranks of all joined hosts, in order."""
        return [rank for _, host in sorted(self._hosts.items()) for _, rank in sorted(host.ranks.items())]

    async def open_group(self) -> GroupDescriptors:
        """Make what this host's ranks share, and begin to carry their records to the other hosts and back. The ranks
        inherit the result, which the caller must close.
        """
        group, descriptors = await HostGroup.open(self.ranks_a_host)
        self._carry_for(group)
        return descriptors

    async def take_group(self, handle: GroupHandle) -> None:
        """The same for ranks that have it from their former group."""
        self._carry_for(await HostGroup.take(self.ranks_a_host, handle))

    def dismiss(self) -> None:
        """Let all hosts go, because one was lost. Those that are left keep what their ranks have loaded, and join the
        service that follows.
        """
        for host in self._hosts.values():
            host.dismiss()

    async def break_up(self, leave: Callable[[], Awaitable[RanksT]]) -> tuple[RanksT, GroupHandle]:
        """Have this host's ranks leave their group: tell them, and wait for `leave`. Returns its result, and a handle
        for `take_group`.
        """
        # From here on no record is passed on to this host: it would be taken for one of the next group.
        group, self._group = self._group, None
        assert group is not None and self._carrying is not None
        try:
            group.line.end()
            left = await leave()
            await self._carrying
            group.renew()
            return left, group.leave()
        finally:
            group.close()

    def carry(self, number: int, record: bytes) -> None:
        """Pass a host's record on to all others."""
        if self._group is not None:
            self._group.line.write(record)
        self._send(number, record)

    def close(self) -> None:
        if self._carrying is not None:
            self._carrying.cancel()
        if self._group is not None:
            self._group.close()
            self._group = None

    def _carry_for(self, group: HostGroup) -> None:
        self._group = group
        self._carrying = asyncio.create_task(group.line.run(self._on_own_record))

    async def _on_own_record(self, record: bytes) -> None:
        self._send(0, record)

    def _send(self, sender: int, record: bytes) -> None:
        for number, host in self._hosts.items():
            if number != sender:
                host.send_record(record)
