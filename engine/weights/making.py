"""The model that a configuration asks for."""

import torch

from engine.config import ResolvedEngineConfig
from engine.exchange.interface import RankExchange
from engine.model.model import Model
from engine.weights.loading import load_model, random_model
from engine.weights.offloading import Offloading


def make_model(resolved: ResolvedEngineConfig, exchange: RankExchange | None = None) -> Model:
    """exchange: with the worker's other ranks, if there are any. Raises CheckpointError, ConfigError."""
    config = resolved.config
    assert config.model_dir is not None
    make = random_model if config.random_weights else load_model
    device, dtype = torch.device(resolved.device), getattr(torch, resolved.dtype)
    return make(
        config.model_dir,
        dtype,
        device,
        resolved.weights,
        drafts=config.drafts.most,
        fp8_queries=config.query_weights == "fp8",
        exchange=exchange,
        balance=config.settled_balance,
        offloading=Offloading(resolved),
    )
