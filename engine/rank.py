"""A rank: the process that holds one engine. `python -m engine.rank SOCKET_FD`, started by engine.client.

It ends when its service says Stop, closes the socket or dies; terminal signals are the service's business, which may
have requests to finish first.
"""

import gc
import signal
import socket
import sys
import time
from pathlib import Path

import psutil

from engine.batch import Backend
from engine.config import EngineConfig, Hardware, resolve
from engine.engine import Engine
from engine.messages import Cancel, Failed, Ready, Start, Stop, Submit
from engine.oracle import OracleBackend
from engine.rank_link import RankLink
from mesh.config import ObserveConfig
from mesh.errors import EngineFailed, MeshError
from mesh.observe import configure, span


def main(arguments: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = RankLink(socket.socket(fileno=int(arguments[0])))
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
    except MeshError as error:
        _report(link, Failed(error.reason, error.message))
        return 1
    except Exception as error:
        _report(link, Failed(EngineFailed.reason, f"{type(error).__name__}: {error}"))
        raise
    engine = Engine(config, backend, time.monotonic)
    link.send(_ready(config, backend, engine))
    serve(link, engine)
    return 0


def serve(link: RankLink, engine: Engine) -> None:
    """Step while there is work, sleep while there is none; return when the service is done with us."""
    # What loading allocated lives as long as the process: collections need not walk it.
    gc.freeze()
    while True:
        for message in link.receive(wait=not engine.has_work()):
            if isinstance(message, Submit):
                engine.submit(message)
            elif isinstance(message, Cancel):
                engine.cancel(message)
            else:
                assert isinstance(message, Stop)
                return
        if link.closed:
            return
        if engine.has_work() and (result := engine.step()) is not None:
            link.send(result)


def make_backend(config: EngineConfig) -> Backend:
    """The backend that `config` asks for, ready to execute. Raises CheckpointError, ConfigError."""
    if config.backend == "oracle":
        return OracleBackend(config)
    # Only here: an oracle rank starts fast and small without torch.
    import torch

    from engine.runner import ModelBackend

    hardware = Hardware(torch.cuda.device_count(), psutil.virtual_memory().available)
    return ModelBackend(resolve(config, hardware))


def _ready(config: EngineConfig, backend: Backend, engine: Engine) -> Ready:
    return Ready(
        model=backend.model,
        namespace=backend.namespace,
        context_tokens=engine.context_tokens,
        vocabulary_size=backend.vocabulary_size,
        total_blocks=backend.total_blocks,
        block_bytes=backend.block_bytes,
        max_requests=config.max_requests,
        peak_bytes=_peak_resident_bytes(),
    )


def _report(link: RankLink, failed: Failed) -> None:
    link.send(failed)
    link.flush()


def _peak_resident_bytes() -> int:
    # Not getrusage: its maximum survives exec, and would be the parent's.
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
