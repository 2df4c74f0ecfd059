"""One rank, from its service's Start to a Stop, or to a Release, after which it is started again with its weights."""

import gc
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine.backend import Backend
from engine.config import EngineConfig
from engine.constraints.constraints import Constraints, load_constraints
from engine.engine import Engine
from engine.parallel.hosts_lockstep import agreement_of
from engine.parallel.layout import Layout, Place
from engine.parallel.peers import GroupDescriptors, Peers
from engine.protocol.messages import Failed, Ready, Released, Start
from engine.protocol.pulse import Pulse
from engine.rank.backends import Backends
from engine.rank.heartbeat import Heartbeat, longest_step_seconds
from engine.rank.link import RankLink, Rendezvous
from engine.rank.loop import FollowerLoop, RankLoop
from engine.requests.intake import longest_context
from engine.role_change import check_keeps_weights
from engine.step.agreement import OneRank
from mesh.domain.workers import HostTierStatus
from mesh.errors import EngineFailed, MeshError, RankLost
from mesh.event_fd import EventFd
from mesh.observe.spans import span
from mesh.start_times import StartTimes, process_seconds
from transfer.block_macs import Authorship
from transfer.ucx_log import UcxLog

if TYPE_CHECKING:
    from transfer.agent import TransferAgent

_log = logging.getLogger("deepmesh.engine")
# How long a rank that has lost another waits before it says so. The service ends the ranks that are left when one has
# gone or hangs, and then names that one.
LOST_SECONDS = 1.75
# How long a rank that could keep its weights waits until its service says that a host was lost: longer than the service
# takes to notice one that is silent.
NOTICE_SECONDS = 10.0


class Rank:
    """What outlives a release: the process, its connection to the service, the other ranks, and what was loaded."""

    def __init__(self, link: RankLink, pulse: Pulse, wakeup: EventFd, group: GroupDescriptors | None) -> None:
        """group: what it shares with the worker's ranks on its host; None if the worker has no other rank."""
        # In the worker.
        self._number = 0
        self._link = link
        self._pulse = pulse
        self._wakeup = wakeup
        self._group = group
        self._peers: Peers | None = None
        self._config: EngineConfig | None = None
        self._backends: Backends | None = None
        self._constraints: Constraints | None = None
        self._ucx_log: UcxLog | None = None

    def run(self, start: Start) -> int | None:
        """Load, unless that is done, and serve. Returns the process's exit status, or None once released."""
        config, times = EngineConfig.model_validate_json(start.config), StartTimes()
        self._number = start.rank
        if self._config is None:
            times.seconds["process"] = process_seconds()
        try:
            return self._serve(config, start.authorship, times)
        except RankLost as error:
            _log.error("this rank waits to be ended", extra={"fields": {"cause": error.message}})
            time.sleep(LOST_SECONDS)
            self._report(Failed(error.reason, error.message))
            return 1

    def _serve(self, config: EngineConfig, authorship: Authorship | None, times: StartTimes) -> int | None:
        try:
            with span("engine.load", backend=config.backend):
                backend, agent, constraints = self._load(config, authorship, times)
        except RankLost as error:
            if not self._leaves_group(error):
                raise
            self._link.send(Released())
            return None
        except MeshError as error:
            self._report(Failed(error.reason, error.message))
            return 1
        except Exception as error:
            self._report(Failed(EngineFailed.reason, f"{type(error).__name__}: {error}"))
            raise
        if not self._run_steps(config, backend, agent, constraints, times):
            return 0
        self._link.send(Released())
        return None

    def _load(
        self, config: EngineConfig, authorship: Authorship | None, times: StartTimes
    ) -> "tuple[Backend, TransferAgent | None, Constraints | None]":
        backend = self._make_backend(config, times)
        agent, constraints = None, None
        if self._leads:
            agent = make_agent(config, authorship, backend, self._wakeup, self._number, times)
            constraints = self._make_constraints(config, backend)
        times.mark("grammars")
        if agent is not None and self._ucx_log is None:
            self._ucx_log = UcxLog()
        return backend, agent, constraints

    def _run_steps(
        self,
        config: EngineConfig,
        backend: Backend,
        agent: "TransferAgent | None",
        constraints: Constraints | None,
        times: StartTimes,
    ) -> bool:
        """Report readiness, and take steps until stopped or released. Returns whether this rank was released."""
        peers = self._peers
        agreement = OneRank() if peers is None else agreement_of(peers)
        heartbeat = Heartbeat(self._pulse, agent, longest_step_seconds(config, on_gpu=backend.asynchronous))
        loop: RankLoop | FollowerLoop
        host_tier = None
        if self._leads:
            rank = 0 if peers is None else peers.in_worker.dp_index
            engine = Engine(config, backend, time.monotonic, agent, agreement, constraints, rank)
            host_tier = engine.load().host_tier
            loop = RankLoop(self._link, engine, heartbeat)
        else:
            loop = FollowerLoop(self._link, backend, agreement, heartbeat)
        self._link.send(_ready(config, backend, agent, times, self._can_regroup, host_tier))
        # Objects made by loading live as long as the process: garbage collections need not visit them.
        gc.freeze()
        heartbeat.start()
        try:
            released = loop.run()
        except RankLost as error:
            released = self._leaves_group(error)
            if not released:
                raise
        if agent is not None:
            agent.close()
        # Closed last: without heartbeats the service would soon take this rank for hanging.
        heartbeat.close()
        return released

    @property
    def _leads(self) -> bool:
        """Only the first rank of a TP group has requests and moves KV; the others compute its steps, and get what has
        landed there.
        """
        return self._peers is None or self._peers.place.leads

    @property
    def _can_regroup(self) -> bool:
        over_hosts = self._peers is not None and self._peers.in_worker.layout.hosts > 1
        return over_hosts and self._backends is not None and self._backends.can_regroup

    def _leaves_group(self, error: RankLost) -> bool:
        """After the loss of another rank, leave the group, if this rank can join a new one with its weights, and if the
        service finds in time that another host was lost.
        """
        peers = self._peers
        if peers is None or not self._can_regroup:
            return False
        assert self._backends is not None
        self._backends.leave()
        _log.warning("this rank keeps its weights for a new group", extra={"fields": {"cause": error.message}})
        if not peers.leave(NOTICE_SECONDS):
            return False
        self._peers = None
        return True

    def _make_backend(self, config: EngineConfig, times: StartTimes) -> Backend:
        keeps_weights = True
        if self._peers is None and self._group is not None:
            self._peers = Peers(Place(Layout.of(config.parallel), self._number), self._group)
            if self._backends is not None:
                keeps_weights = self._backends.regroup(self._peers, config)
        if self._backends is None:
            self._backends = Backends(self._peers, Rendezvous(self._link))
        else:
            assert self._config is not None
            if keeps_weights:
                check_keeps_weights(self._config, config)
            # Free the pool, and all that refers to it, to make room for the next one.
            gc.unfreeze()
            gc.collect()
            times.mark("freeing")
        self._config = config
        return self._backends.make(config, times)

    def _make_constraints(self, config: EngineConfig, backend: Backend) -> Constraints:
        before = self._constraints
        if before is None:
            made = load_constraints(config, backend.vocabulary_size, backend.eos_token_ids, self._wakeup.set)
        else:
            made = before.successor()
        self._constraints = made
        return made

    def _report(self, failed: Failed) -> None:
        self._link.send(failed)
        self._link.flush()


def make_agent(
    config: EngineConfig,
    authorship: Authorship | None,
    backend: Backend,
    wakeup: EventFd,
    rank: int,
    times: StartTimes,
) -> "TransferAgent | None":
    if config.transfer is None:
        return None
    # Imported only here: a rank that moves no KV starts without UCX.
    from transfer.agent import TransferAgent
    from transfer.tuning import tune_for_gpu_transfers

    memory = backend.kv_memory()
    if memory.is_on_gpu:
        tune_for_gpu_transfers()
    return TransferAgent(
        memory,
        backend.namespace,
        config.transfer,
        time.monotonic,
        wakeup.set,
        rank=rank,
        authorship=authorship,
        times=times,
    )


def _ready(
    config: EngineConfig,
    backend: Backend,
    agent: "TransferAgent | None",
    times: StartTimes,
    can_regroup: bool,
    host_tier: HostTierStatus | None,
) -> Ready:
    return Ready(
        model=backend.model,
        namespace=backend.namespace,
        context_tokens=longest_context(backend),
        vocabulary_size=backend.vocabulary_size,
        eos_token_ids=backend.eos_token_ids,
        total_blocks=backend.total_blocks,
        block_bytes=backend.block_bytes,
        max_requests=config.max_requests,
        peak_bytes=_peak_resident_bytes(),
        transfer_address=None if agent is None else agent.address,
        segment_bytes=None if agent is None else agent.segment_bytes,
        device_name=backend.device_name,
        start_seconds=times.seconds,
        speed=backend.speed,
        can_regroup=can_regroup,
        host_tier=host_tier,
    )


def _peak_resident_bytes() -> int:
    # Not getrusage: its maximum survives exec, so that it would be the parent's.
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024
