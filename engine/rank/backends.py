"""The backend that a configuration asks for."""

import psutil

from engine.batch import Backend
from engine.config import EngineConfig, Hardware, resolve
from engine.oracle import OracleBackend


def make_backend(config: EngineConfig) -> Backend:
    """The backend that `config` asks for, ready to execute. Raises CheckpointError, ConfigError."""
    if config.backend == "oracle":
        return OracleBackend(config)
    # Imported only here: without torch an oracle rank starts fast and small.
    import torch

    from engine.runner.backend import ModelBackend

    hardware = Hardware(torch.cuda.device_count(), psutil.virtual_memory().available)
    return ModelBackend(resolve(config, hardware))
