"""Steps of several ranks of one worker, each of which moves blocks of its own, or of its TP group."""

import tempfile
from functools import partial
from pathlib import Path

import torch

from bench.exchange.processes import on_each_gpu
from bench.rank.following import follow
from bench.rank.load import fill_pool
from bench.rank.model import MeasuredModel, make_rank
from bench.tiers.configuration import config_of
from bench.tiers.decode_steps import DecodeLoad, Steps, measure_steps
from bench.tiers.rank import TierBackend
from engine.exchange.peer import PeerExchange
from engine.model.config import read_model_config
from engine.parallel.layout import Layout
from engine.runner.cuda_sources import compile_sources
from engine.settings.device import Hardware, resolve


def steps_of_ranks(measured: MeasuredModel, load: DecodeLoad, layout: Layout) -> list[Steps]:
    """Those of the first rank, on one GPU a rank. All ranks have the same load."""
    return on_each_gpu(layout, partial(_steps, measured, load, layout))[0]


def _steps(measured: MeasuredModel, load: DecodeLoad, layout: Layout, exchange: PeerExchange) -> list[Steps]:
    with tempfile.TemporaryDirectory() as scratch:
        config = config_of(measured, Path(scratch), 0, load, layout)
        resolved = resolve(config, Hardware(torch.cuda.device_count(), 0))
        assert config.model_dir is not None
        compile_sources(read_model_config(config.model_dir), resolved)
        backend = TierBackend(config, make_rank(resolved, exchange), exchange)
        fill_pool(backend.state)
        if exchange.place.leads:
            return measure_steps(backend, load)
        # Once with host memory, and once without.
        for _ in range(2):
            follow(backend, exchange.peers.steps, exchange.peers)
        return []
