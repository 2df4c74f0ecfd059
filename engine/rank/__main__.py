"""A rank: the process that holds one engine. `python -m engine.rank RANK SOCKET_FD PULSE_FD [MEMORY_FD WAKEUP_FD...]`.

worker.rank_client starts it; a rank beside others is also given what they share (engine.parallel.peers). It ends when
its service sends Stop, closes the socket or dies. It ignores terminal signals: the service handles them, and may have
requests to finish first.
"""

import gc
import logging
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine.agreement import OneRank
from engine.batch import Backend
from engine.config import EngineConfig
from engine.constraints.constraints import load_constraints
from engine.engine import Engine, longest_context
from engine.parallel.layout import Layout, Place
from engine.parallel.lockstep import Lockstep
from engine.parallel.peers import GroupDescriptors, Peers
from engine.protocol.messages import Failed, Ready, Start
from engine.protocol.pulse import Pulse
from engine.rank.backends import make_backend
from engine.rank.follower import FollowerLoop
from engine.rank.heartbeat import Heartbeat, longest_step_seconds
from engine.rank.link import RankLink
from engine.rank.loop import RankLoop
from mesh.config import ObserveConfig
from mesh.errors import EngineFailed, MeshError, RankLost
from mesh.event_fd import EventFd
from mesh.observe import configure, span
from transfer.block_macs import Authorship
from transfer.ucx_log import UcxLog

if TYPE_CHECKING:
    from transfer.agent import TransferAgent

_log = logging.getLogger("deepmesh.engine")
# How long a rank that has lost another waits before it says so. The service ends the ranks that are left when one has
# gone or hangs, and then names that one.
LOST_SECONDS = 1.75


def main(arguments: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    rank, connection, pulse_descriptor, *shared = map(int, arguments)
    group = GroupDescriptors(shared[0], shared[1:]) if shared else None
    wakeup = EventFd(None if group is None else group.wakeups[rank])
    link = RankLink(socket.socket(fileno=connection), wakeup)
    pulse = Pulse(pulse_descriptor)
    starts = link.receive(wait=True)
    if not starts:
        return 0
    start = starts[0]
    assert isinstance(start, Start)
    configure("rank", ObserveConfig.model_validate_json(start.observe))
    config = EngineConfig.model_validate_json(start.config)
    peers = None if group is None else Peers(Place(Layout.of(config.parallel), rank), group)
    try:
        return _run(config, start.authorship, rank, peers, link, pulse, wakeup)
    except RankLost as error:
        _log.error("this rank waits to be ended", extra={"fields": {"cause": error.message}})
        time.sleep(LOST_SECONDS)
        _report(link, Failed(error.reason, error.message))
        return 1


def _run(
    config: EngineConfig,
    authorship: Authorship | None,
    rank: int,
    peers: Peers | None,
    link: RankLink,
    pulse: Pulse,
    wakeup: EventFd,
) -> int:
    try:
        with span("engine.load", backend=config.backend):
            backend = make_backend(config, peers)
            leads = peers is None or peers.place.leads
            # Only the first rank of a TP group moves KV; the others get what has landed there.
            agent = _make_agent(config, authorship, backend, wakeup, rank) if leads else None
            constraints = load_constraints(config, backend.vocabulary_size, backend.eos_token_ids, wakeup.set)
    except RankLost:
        raise
    except MeshError as error:
        _report(link, Failed(error.reason, error.message))
        return 1
    except Exception as error:
        _report(link, Failed(EngineFailed.reason, f"{type(error).__name__}: {error}"))
        raise
    if agent is not None:
        UcxLog()
    agreement = OneRank() if peers is None else Lockstep(peers.steps, peers.wake)
    heartbeat = Heartbeat(pulse, agent, longest_step_seconds(config, on_gpu=backend.asynchronous))
    loop: RankLoop | FollowerLoop
    if leads:
        engine = Engine(config, backend, time.monotonic, agent, agreement, constraints)
        loop = RankLoop(link, engine, heartbeat)
    else:
        loop = FollowerLoop(link, backend, agreement, heartbeat)
    link.send(_ready(config, backend, agent))
    # Objects made by loading live as long as the process: garbage collections need not visit them.
    gc.freeze()
    heartbeat.start()
    loop.run()
    heartbeat.close()
    if agent is not None:
        agent.close()
    return 0


def _make_agent(
    config: EngineConfig, authorship: Authorship | None, backend: Backend, wakeup: EventFd, rank: int
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
        memory, backend.namespace, config.transfer, time.monotonic, wakeup.set, rank=rank, authorship=authorship
    )


def _ready(config: EngineConfig, backend: Backend, agent: "TransferAgent | None") -> Ready:
    return Ready(
        model=backend.model,
        namespace=backend.namespace,
        context_tokens=longest_context(backend),
        vocabulary_size=backend.vocabulary_size,
        total_blocks=backend.total_blocks,
        block_bytes=backend.block_bytes,
        max_requests=config.max_requests,
        peak_bytes=_peak_resident_bytes(),
        transfer_address=None if agent is None else agent.address,
        device_name=backend.device_name,
    )


def _report(link: RankLink, failed: Failed) -> None:
    link.send(failed)
    link.flush()


def _peak_resident_bytes() -> int:
    # Not getrusage: its maximum survives exec, so that it would be the parent's.
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
