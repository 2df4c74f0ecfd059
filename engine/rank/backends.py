"""The backend that a configuration asks for."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import psutil

from engine.backend import Backend
from engine.config import EngineConfig
from engine.oracle.backend import OracleBackend
from engine.parallel.peers import Peers
from engine.rank.gpu import take_gpu
from engine.rank.link import Rendezvous
from engine.settings.device import Hardware, ResolvedEngineConfig, resolve
from mesh.errors import EngineFailed
from mesh.start_times import StartTimes

if TYPE_CHECKING:
    from engine.exchange.interface import RankExchange
    from engine.exchange.peer import PeerExchange
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
        # Whether the exchange reaches the present peers.
        self._connected = False
        # Between GPUs of this host.
        self._between_gpus: PeerExchange | None = None
        # Has the device wait for no rank of another host.
        self._leave: Callable[[], None] = lambda: None
        self._model: Model | None = None
        # `kv_namespace` of the configuration that loaded the model, and the checkpoint's fingerprint then.
        self._loaded: tuple[str | None, str] = (None, "")
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
        from engine.memory.full_gpu import full_gpu, lacks_memory
        from engine.runner.backend import ModelBackend
        from kernels.cache_files import cache_folder

        times.mark("imports")
        # This asks NVML, not the CUDA driver, which must not settle yet which GPUs this process sees.
        hardware = Hardware(torch.cuda.device_count(), psutil.virtual_memory().available)
        resolved = resolve(config, hardware)
        if self._peers is not None and not self._connected:
            self._connect(self._peers, resolved, hardware)
        if self._between_gpus is not None:
            self._between_gpus.limit(STARTING_SECONDS)
        kept = None if config.warm_up == "off" else cache_folder()
        try:
            backend = ModelBackend(resolved, self._model, self._exchange, times, self._warm, kept)
        except RuntimeError as error:
            if resolved.device == "cpu" or not lacks_memory(error):
                raise
            raise full_gpu(torch.device(resolved.device)) from error
        if resolved.warm_up and self._between_gpus is not None:
            # Without the warm-up a rank may still compile while it serves.
            self._between_gpus.limit(SERVING_SECONDS)
        loaded = config.kv_namespace, backend.namespace.weights_fingerprint
        if self._model is not None and loaded[0] == self._loaded[0] and loaded != self._loaded:
            raise EngineFailed(f"{config.model_dir} has another checkpoint now than the one that this rank has loaded")
        self._model, self._loaded = backend.weights, loaded
        return backend

    @property
    def can_regroup(self) -> bool:
        """Whether what was loaded can serve with the ranks of another group, in place of some that were lost. DeepEP's
        communicators cannot be made again.
        """
        return self._model is None or not self._model.expert_group.uses_deep_ep

    def leave(self) -> None:
        """Have nothing on the device wait for a rank that was lost."""
        self._leave()

    def regroup(self, peers: Peers, config: EngineConfig) -> bool:
        """Have the next backend exchange with the ranks of a new group. Returns whether it keeps the weights. It does
        not if it has another place, or if experts move: what a rank that was lost held of them is not known to the one
        that replaces it.
        """
        moves = config.settled_balance.interval_steps is not None or config.balance.placement_file is not None
        stays = self._peers is not None and peers.in_worker == self._peers.in_worker
        keeps = stays and not moves
        if not keeps:
            self._model = None
        # All ranks run the steps of a warm-up together, and some of them are new.
        self._warm.clear()
        self._peers, self._connected = peers, False
        return keeps

    def _connect(self, peers: Peers, resolved: ResolvedEngineConfig, hardware: Hardware) -> None:
        within, place = self._within_host(peers, resolved.device, hardware), peers.in_worker
        if place.layout.hosts == 1:
            self._exchange = within
        else:
            self._exchange = self._over_hosts(peers, within, resolved)
        self._connected = True

    def _within_host(self, peers: Peers, device: str, hardware: Hardware) -> "RankExchange":
        if device == "cpu":
            from engine.exchange.host import HostExchange

            return HostExchange(peers)
        if self._between_gpus is not None:
            self._between_gpus.regroup(peers)
            return self._between_gpus
        take_gpu(peers.place.rank, hardware.cuda_devices)
        import torch

        from engine.exchange.peer import PeerExchange

        self._between_gpus = PeerExchange(peers, torch.device(device))
        return self._between_gpus

    def _over_hosts(self, peers: Peers, within: "RankExchange", resolved: ResolvedEngineConfig) -> "RankExchange":
        import torch

        from engine.exchange.hosts import HostsExchange
        from engine.exchange.likeness import check_likeness
        from engine.exchange.rail import Rail
        from engine.exchange.store import AskedStore
        from engine.model.config import read_model_config

        assert self._rendezvous is not None and resolved.config.model_dir is not None
        place, number, device = peers.in_worker, peers.place.rank, torch.device(resolved.device)
        store = AskedStore(f"rail {number}", self._rendezvous.publish, self._rendezvous.look_up)
        model = asdict(read_model_config(resolved.config.model_dir))
        check_likeness(store, place.host, place.layout.hosts, resolved.device, model)
        rail = Rail(
            store,
            place.host,
            place.layout.hosts,
            device,
            broken=lambda: peers.broken,
            give_up=peers.give_up,
            given_up=lambda: peers.given_up,
        )
        if isinstance(self._exchange, HostsExchange):
            # The model refers to it.
            self._exchange.regroup(place, within, rail)
            return self._exchange
        exchange = HostsExchange(place, within, rail, device)
        self._leave = exchange.leave
        return exchange
