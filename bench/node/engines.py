"""What benches of several ranks do with an engine on each of them."""

import time

from bench.rank.load import RankLoad, fill_pool
from engine.config import ResolvedEngineConfig
from engine.engine import Engine
from engine.exchange.interface import Exchange
from engine.model.model import Model
from engine.parallel.peers import Peers
from engine.runner.backend import ModelBackend


class RankEngine:
    """One rank's engine over a model that exists, in lockstep with the other ranks' if there is an exchange.

    Attributes:
        backend: what computes its steps.
        load: requests for it.
    """

    def __init__(
        self, resolved: ResolvedEngineConfig, model: Model, exchange: Exchange | None = None, peers: Peers | None = None
    ) -> None:
        """exchange and peers: with the other ranks, which all make the same."""
        self.backend = ModelBackend(resolved, model, exchange)
        fill_pool(self.backend.state.kv_pool)
        agreement = None if peers is None else peers.steps
        self._engine = Engine(resolved.config, self.backend, time.monotonic, agreement=agreement)
        self.load = RankLoad(self._engine, self.backend)

    def stop(self) -> None:
        """Compute what other ranks still need, until all have stopped."""
        self._engine.stop()
        while not self._engine.stopped:
            self._engine.step()
