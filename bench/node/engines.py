"""An engine on each of several ranks, for benches."""

import time

from bench.rank.load import RankLoad, fill_pool
from engine.engine import Engine
from engine.exchange.interface import RankExchange
from engine.model.model import Model
from engine.parallel.peers import Peers
from engine.runner.backend import ModelBackend
from engine.settings.device import ResolvedEngineConfig


class RankEngine:
    """One rank's engine over a given model. If there is an exchange, it runs in lockstep with the other ranks' engines.

    Attributes:
        backend: what computes the engine's steps.
        load: makes requests for the engine.
    """

    def __init__(
        self,
        resolved: ResolvedEngineConfig,
        model: Model,
        exchange: RankExchange | None = None,
        peers: Peers | None = None,
    ) -> None:
        """exchange, peers: those with the other ranks; all ranks construct a RankEngine."""
        self.backend = ModelBackend(resolved, model, exchange)
        fill_pool(self.backend.state)
        agreement = None if peers is None else peers.steps
        self._engine = Engine(resolved.config, self.backend, time.monotonic, agreement=agreement)
        self.load = RankLoad(self._engine, self.backend)

    def stop(self) -> None:
        """Stop. Until all ranks have stopped, this one computes the steps that the others still need."""
        self._engine.stop()
        while not self._engine.stopped:
            self._engine.step()
