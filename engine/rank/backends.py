"""The backend that a configuration asks for."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil

from engine.batch import Backend
from engine.config import EngineConfig, Hardware, resolve
from engine.oracle.backend import OracleBackend
from engine.parallel.layout import Place
from engine.parallel.peers import Peers
from engine.rank.gpu import take_gpu
from engine.rank.link import Rendezvous
from mesh.start_times import StartTimes

if TYPE_CHECKING:
    from engine.exchange.interface import RankExchange
    from engine.model.model import Model
    from engine.runner.warm_up import StepKind

# How long a GPU waits for another rank's GPU. All ranks have agreed on a step before one launches it.
SERVING_SECONDS = 3.0


class Backends:
    """Makes the backends of one process, one after another. The first loads the weights, and the others take them."""

    def __init__(self, peers: Peers | None = None, rendezvous: Rendezvous | None = None) -> None:
        """peers: the worker's other ranks, if there are any; rendezvous: where those of several hosts meet."""
        self._peers = peers
        self._rendezvous = rendezvous
        self._exchange: RankExchange | None = None
        # Sets how long a GPU waits for another rank's GPU.
        self._limit: Callable[[float], None] = lambda seconds: None
        self._model: Model | None = None
        self._warm: set[StepKind] = set()

    def make(self, config: EngineConfig, times: StartTimes | None = None) -> Backend:
        """The backend that `config` asks for, ready to execute; the one before must be gone, its memory is needed.
        `times` is told what each phase of that took.

        Raises CheckpointError, ConfigError, EngineFailed, RankLost.
        """
        times = times or StartTimes()
        if config.backend == "oracle":
            return OracleBackend(config)
        # Imported only here: without torch an oracle rank starts fast and small.
        import torch

        from engine.exchange.interface import STARTING_SECONDS
        from engine.runner.backend import ModelBackend
        from kernels.cache_files import cache_folder

        times.mark("imports")
        # This asks NVML, not the CUDA driver, which must not settle yet which GPUs this process sees.
        hardware = Hardware(torch.cuda.device_count(), psutil.virtual_memory().available)
        resolved = resolve(config, hardware)
        if self._peers is not None and self._exchange is None:
            self._connect(self._peers, resolved.device, hardware)
        self._limit(STARTING_SECONDS)
        speeds = None if config.warm_up == "off" else cache_folder()
        backend = ModelBackend(resolved, self._model, self._exchange, times, self._warm, speeds)
        if resolved.warm_up:
            # Without the warm-up a rank may still compile while it serves.
            self._limit(SERVING_SECONDS)
        self._model = backend.weights
        return backend

    def _connect(self, peers: Peers, device: str, hardware: Hardware) -> None:
        within, place = self._within_host(peers, device, hardware), peers.in_worker
        self._exchange = within if place.layout.hosts == 1 else self._over_hosts(place, within, device)

    def _within_host(self, peers: Peers, device: str, hardware: Hardware) -> "RankExchange":
        if device == "cpu":
            from engine.exchange.host import HostExchange

            return HostExchange(peers)
        take_gpu(peers.place.rank, hardware.cuda_devices)
        import torch

        from engine.exchange.peer import PeerExchange

        exchange = PeerExchange(peers, torch.device(device))
        self._limit = exchange.limit
        return exchange

    def _over_hosts(self, place: Place, within: "RankExchange", device: str) -> "RankExchange":
        import torch

        from engine.exchange.hosts import HostsExchange
        from engine.exchange.rail import AskedStore, Rail

        assert self._rendezvous is not None
        number, hosts = place.on_host.rank, place.layout.hosts
        store = AskedStore(f"rail {number}", self._rendezvous.publish, self._rendezvous.look_up)
        rail = Rail(store, place.host, hosts, torch.device(device))
        return HostsExchange(place, within, rail, torch.device(device))
