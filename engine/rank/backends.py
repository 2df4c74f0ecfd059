"""The backend that a configuration asks for."""

import psutil

from engine.batch import Backend
from engine.config import EngineConfig, Hardware, resolve
from engine.oracle import OracleBackend
from engine.parallel.peers import Peers


def make_backend(config: EngineConfig, peers: Peers | None = None) -> Backend:
    """The backend that `config` asks for, ready to execute. peers: the worker's other ranks, if there are any.

    Raises CheckpointError, ConfigError, RankLost.
    """
    if config.backend == "oracle":
        return OracleBackend(config)
    # Imported only here: without torch an oracle rank starts fast and small.
    import torch

    from engine.exchange.host import HostExchange
    from engine.runner.backend import ModelBackend

    hardware = Hardware(torch.cuda.device_count(), psutil.virtual_memory().available)
    exchange = None if peers is None else HostExchange(peers)
    return ModelBackend(resolve(config, hardware), exchange=exchange)
