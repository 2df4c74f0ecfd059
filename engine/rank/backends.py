"""The backend that a configuration asks for."""

import psutil

from engine.batch import Backend
from engine.config import EngineConfig, Hardware, resolve
from engine.oracle import OracleBackend
from engine.parallel.peers import Peers
from engine.rank.gpu import take_gpu

# How long a GPU waits for another rank's. All ranks have agreed on a step when one launches it.
SERVING_SECONDS = 3.0


def make_backend(config: EngineConfig, peers: Peers | None = None) -> Backend:
    """The backend that `config` asks for, ready to execute. peers: the worker's other ranks, if there are any.

    Raises CheckpointError, ConfigError, EngineFailed, RankLost.
    """
    if config.backend == "oracle":
        return OracleBackend(config)
    # Imported only here: without torch an oracle rank starts fast and small.
    import torch

    from engine.runner.backend import ModelBackend

    # Asks the driver's library of GPUs, not the driver: it has not settled yet which ones this process sees.
    hardware = Hardware(torch.cuda.device_count(), psutil.virtual_memory().available)
    resolved = resolve(config, hardware)
    if peers is None:
        return ModelBackend(resolved)
    if resolved.device == "cpu":
        from engine.exchange.host import HostExchange

        return ModelBackend(resolved, exchange=HostExchange(peers))
    take_gpu(peers.place.rank, hardware.cuda_devices)
    from engine.exchange.peer import PeerExchange

    exchange = PeerExchange(peers, torch.device(resolved.device))
    backend = ModelBackend(resolved, exchange=exchange)
    if resolved.warm_up:
        # Otherwise a rank may still compile.
        exchange.limit(SERVING_SECONDS)
    return backend
