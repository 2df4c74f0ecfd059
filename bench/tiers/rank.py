"""One rank of a published model, whose engines keep evicted blocks in host memory or nowhere."""

import time
from collections.abc import Callable, Sequence

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.exchange.peer import PeerExchange
from engine.model.model import Model
from engine.moves.host_slots import HostSlots
from engine.protocol.messages import Submit
from engine.rank.loop import LOOK_SECONDS, READ_LOOK_SECONDS
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve
from mesh.domain.requests import TokenRequest
from mesh.domain.sampling import Sampling, StopConditions
from mesh.domain.targets import StoreTarget
from mesh.errors import EngineFailed
from transfer.agent import TransferAgent

# How long page-locking may take.
LOCKING_SECONDS = 60.0
_LOOK_SECONDS = 0.01


class TierBackend(ModelBackend):
    """A backend for several engines, one after another: they share its host memory, which takes long to page-lock.

    Attributes:
        peers: the worker's ranks, if there are several.
    """

    def __init__(self, config: EngineConfig, model: Model, exchange: PeerExchange | None = None) -> None:
        """exchange: with the worker's other ranks. Waits until the host memory is page-locked. Raises EngineFailed if
        there is none for the blocks that `config` asks for.
        """
        super().__init__(resolve(config, Hardware(torch.cuda.device_count(), 1 << 40)), model, exchange)
        self.config = config
        self.peers = None if exchange is None else exchange.peers
        self._lends = False
        if exchange is not None and not exchange.place.leads:
            return
        self._kept = super().host_slots()
        if self._kept is None:
            raise EngineFailed("host memory has no room for the blocks: lower the longest prefix")
        _await_blocks(self._kept, config.host_blocks)

    def host_slots(self) -> HostSlots | None:
        return self._kept if self._lends else None

    def engine(self, *, host: bool = False, agent: TransferAgent | None = None) -> Engine:
        """An engine that knows no prefix. host: whether it keeps evicted blocks in host memory."""
        self._lends = host
        agreement = None if self.peers is None else self.peers.steps
        return Engine(self.config, self, time.monotonic, agent, agreement)


def _await_blocks(slots: HostSlots, count: int | str) -> None:
    """Return once there are as many: memory is page-locked in another thread."""
    assert isinstance(count, int)
    deadline = time.monotonic() + LOCKING_SECONDS
    while slots.count < count:
        if time.monotonic() > deadline:
            raise EngineFailed(
                f"{slots.count} of {count} blocks of host memory were page-locked: lower the longest prefix"
            )
        time.sleep(_LOOK_SECONDS)


def submit(key: int, prompt: Sequence[int], max_tokens: int = 1, fetch: StoreTarget | None = None) -> Submit:
    stop = StopConditions(max_tokens, ignore_eos=True)
    return Submit(key, TokenRequest(str(key), list(prompt), Sampling(), stop), fetch=fetch)


def first_token(engine: Engine, asked: Submit, wait: Callable[[float], None]) -> tuple[float, int]:
    """Seconds from submitting the only request to its first token, and how many tokens it found in a cache.

    wait: returns when the transfer agent has news, or after as many seconds.
    """
    began, seconds, cached = time.perf_counter(), 0.0, 0
    engine.submit(asked)
    while not seconds or engine.has_work():
        if not engine.has_work():
            wait(READ_LOOK_SECONDS if engine.transfers.open_reads else LOOK_SECONDS)
        engine.poll_transfers()
        result = engine.step() if engine.has_work() else None
        for output in () if result is None else result.outputs:
            assert output.refusal is None, output
            if output.token_ids:
                seconds, cached = time.perf_counter() - began, output.cached_tokens or 0
        engine.transfers.drain_news()
    return seconds, cached
