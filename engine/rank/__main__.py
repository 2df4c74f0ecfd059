"""A rank: the process that holds one engine. `python -m engine.rank SOCKET_FD PULSE_FD`, started by worker.rank_client.

It ends when its service sends Stop, closes the socket or dies. It ignores terminal signals: the service handles them,
and may have requests to finish first.
"""

import gc
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine.batch import Backend
from engine.config import EngineConfig
from engine.engine import Engine
from engine.protocol.messages import Failed, Ready, Start
from engine.protocol.pulse import Pulse
from engine.rank.backends import make_backend
from engine.rank.heartbeat import Heartbeat, longest_step_seconds
from engine.rank.link import RankLink
from engine.rank.loop import RankLoop
from mesh.config import ObserveConfig
from mesh.errors import EngineFailed, MeshError
from mesh.event_fd import EventFd
from mesh.observe import configure, span
from transfer.ucx_log import UcxLog

if TYPE_CHECKING:
    from transfer.agent import TransferAgent


def main(arguments: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    wakeup = EventFd()
    link = RankLink(socket.socket(fileno=int(arguments[0])), wakeup)
    pulse = Pulse(int(arguments[1]))
    starts = link.receive(wait=True)
    if not starts:
        return 0
    start = starts[0]
    assert isinstance(start, Start)
    configure("rank", ObserveConfig.model_validate_json(start.observe))
    config = EngineConfig.model_validate_json(start.config)
    try:
        with span("engine.load", backend=config.backend):
            backend = make_backend(config)
            agent = _make_agent(config, backend, wakeup, start.rank)
    except MeshError as error:
        _report(link, Failed(error.reason, error.message))
        return 1
    except Exception as error:
        _report(link, Failed(EngineFailed.reason, f"{type(error).__name__}: {error}"))
        raise
    if agent is not None:
        UcxLog()
    engine = Engine(config, backend, time.monotonic, agent)
    link.send(_ready(config, backend, engine, agent))
    # Objects made by loading live as long as the process: garbage collections need not visit them.
    gc.freeze()
    heartbeat = Heartbeat(pulse, agent, longest_step_seconds(config, on_gpu=backend.asynchronous))
    heartbeat.start()
    RankLoop(link, engine, heartbeat).run()
    heartbeat.close()
    if agent is not None:
        agent.close()
    return 0


def _make_agent(config: EngineConfig, backend: Backend, wakeup: EventFd, rank: int) -> "TransferAgent | None":
    if config.transfer is None:
        return None
    # Imported only here: a rank that moves no KV starts without UCX.
    from transfer.agent import TransferAgent
    from transfer.tuning import tune_for_gpu_transfers

    memory = backend.kv_memory()
    if memory.is_on_gpu:
        tune_for_gpu_transfers()
    return TransferAgent(memory, backend.namespace, config.transfer, time.monotonic, wakeup.set, rank=rank)


def _ready(config: EngineConfig, backend: Backend, engine: Engine, agent: "TransferAgent | None") -> Ready:
    return Ready(
        model=backend.model,
        namespace=backend.namespace,
        context_tokens=engine.context_tokens,
        vocabulary_size=backend.vocabulary_size,
        total_blocks=backend.total_blocks,
        block_bytes=backend.block_bytes,
        max_requests=config.max_requests,
        peak_bytes=_peak_resident_bytes(),
        transfer_address=None if agent is None else agent.address,
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
