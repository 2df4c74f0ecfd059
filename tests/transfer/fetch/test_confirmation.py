"""A fetch of mapped blocks, of which the store says at the end that it gave none of them away meanwhile."""

from collections.abc import Callable

import numpy as np
import pytest

from kvstore.store_memory import StoreMemory
from mesh.domain.kv_identity import KvNamespace
from tests.support.fake_transport import FakeTransport
from tests.support.slow_memory import LateMemory
from tests.support.transfer_peer import KnownChains
from transfer.config import TransferConfig
from transfer.events import Event, Fetched
from transfer.exchange import Exchange
from transfer.fetch.lookup import Answer
from transfer.fetch.replay import REPLAYED_MESSAGE
from transfer.host_memory import HostMemory
from transfer.memory import KvMemory, Pool
from transfer.seal import Kind, seal
from transfer.tags import RECEIPT_TAG
from transfer.tally import Tally
from transfer.ticket import StoreSession
from transfer.transport import Arrival

LAYERS, BLOCKS, PIECE, KEY = 2, 4, 64, bytes(32)
NAMESPACE = KvNamespace("weights", "bytes", LAYERS, "bytes")
CHAIN = [bytes([number]) * 16 for number in range(BLOCKS)]
CONFIG = TransferConfig(slot_bytes=1 << 16, slots=2, landing_seconds=3.0, fetch_seconds=5.0)


class Scene:
    """A store that holds blocks for three seconds, and a worker that waits for five."""

    def __init__(self, place: Callable[[Pool], KvMemory] = HostMemory) -> None:
        self.now = 0.0
        self.events: list[Event] = []
        self.refused = Tally()
        memory = StoreMemory(LAYERS, BLOCKS, PIECE)
        for block in range(BLOCKS):
            memory.block(block)[:] = np.random.default_rng(block).bytes(LAYERS * PIECE)
        self.right = np.stack([np.frombuffer(memory.block(block), np.uint8) for block in range(BLOCKS)])
        self.array = np.zeros((LAYERS, BLOCKS, PIECE), np.uint8)
        self.chains = KnownChains(CHAIN, range(BLOCKS))
        self.store_end, self.worker_end = FakeTransport(b"store"), FakeTransport(b"worker")
        self.store = Exchange(
            self.store_end, memory, CONFIG, lambda: self.now, lambda _: None, Tally(), self.chains, None
        )
        self.worker = Exchange(
            self.worker_end,
            place(self.array),
            CONFIG,
            lambda: self.now,
            self.events.append,
            self.refused,
            None,
            None,
        )
        assert self.store.server is not None
        self.store.server.open_session(1, KEY)
        self.worker.fetcher.attach(StoreSession("s", "e", b"store", 1, KEY, NAMESPACE, memory.handle))
        self.worker.fetcher.fetch(7, "s", CHAIN, range(BLOCKS))

    def sent(self, end: FakeTransport) -> list[Arrival]:
        """What this end has sent since the last call."""
        waiting = [each for each in end.sends if not each.completed]
        for each in waiting:
            each.finish()
        return [Arrival(each.tag, len(each.buffer), bytes(each.buffer)) for each in waiting]

    def poll(self, exchange: Exchange, end: FakeTransport) -> None:
        for _ in range(10):
            exchange.poll()
            for each in end.receives:
                if not each.completed:
                    each.write()
                    each.finish()

    def ask(self, *told: Arrival) -> list[Arrival]:
        """What the worker sends the store when it has been told this."""
        for each in told or (None,):
            self.worker_end.arrivals += [] if each is None else [each]
            self.poll(self.worker, self.worker_end)
        return self.sent(self.worker_end)

    def answer(self, *asked: Arrival) -> list[Arrival]:
        """What the store sends the worker when it has been asked this."""
        self.store_end.arrivals += asked
        self.poll(self.store, self.store_end)
        return self.sent(self.store_end)


# Copied at once, or after a moment.
WAYS = pytest.mark.parametrize("place", [HostMemory, LateMemory])


@WAYS
def test_blocks_count_once_the_store_has_confirmed_their_lease(place: Callable[[Pool], KvMemory]) -> None:
    scene = Scene(place)
    (lookup,) = scene.ask()
    (receipt,) = scene.ask(*scene.answer(lookup))
    assert receipt.tag == RECEIPT_TAG
    assert (scene.array.transpose(1, 0, 2).reshape(BLOCKS, -1) == scene.right).all()
    assert not scene.events and scene.chains.leased == BLOCKS
    confirmation = scene.answer(receipt)
    assert scene.chains.leased == 0
    assert scene.ask(*confirmation) == []
    (fetched,) = scene.events
    assert isinstance(fetched, Fetched) and fetched.error is None
    assert (fetched.blocks, fetched.size_bytes) == (BLOCKS, scene.array.size)


@WAYS
@pytest.mark.parametrize("ending", ["late", "closed"])
def test_blocks_that_were_given_away_meanwhile_do_not_count(ending: str, place: Callable[[Pool], KvMemory]) -> None:
    scene = Scene(place)
    (receipt,) = scene.ask(*scene.answer(*scene.ask()))
    if ending == "late":
        scene.now = 4.0
    else:
        assert scene.store.server is not None
        scene.store.server.close_session(1)
    scene.answer()
    assert scene.chains.leased == 0
    assert scene.answer(receipt) == []
    scene.now = 5.0
    scene.ask()
    (fetched,) = scene.events
    assert isinstance(fetched, Fetched) and fetched.blocks == fetched.size_bytes == 0
    assert fetched.error is not None and scene.worker.fetcher.open == 0


def test_a_confirmation_before_all_is_copied_is_refused() -> None:
    scene = Scene()
    answer, _ = scene.answer(*scene.ask())
    early = seal(Kind.ANSWER, KEY, Answer(1, BLOCKS, CONFIG.slot_bytes, mapped=True, confirmed=True))
    scene.ask(answer, Arrival(answer.tag, len(early), early))
    assert scene.refused.counts == {REPLAYED_MESSAGE: 1} and not scene.events
