"""Segments that a worker copies out of a store's memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.store_memory import StoreMemory
from mesh.domain.kv_identity import KvNamespace
from tests.support.fake_transport import FakeTransport
from tests.support.slow_memory import Copying, LateMemory, SlowMemory
from transfer.block_macs import WRONG_BLOCK_MAC, Author, Authorship
from transfer.fetch.mapped_slab import MappedSlab
from transfer.host_memory import HostMemory
from transfer.incoming import Incoming
from transfer.landing import NOT_COPIED, WRONG_SIZE
from transfer.mailbox import Mailbox
from transfer.memory import Done, KvMemory, Pool, tags_in
from transfer.origin import LocalTcp
from transfer.receiver import Receiver
from transfer.seal import Kind, seal
from transfer.segments import Tile
from transfer.slots import SlotPool
from transfer.tally import Tally
from transfer.ticket import Announcement
from transfer.transport import Arrival

LAYERS, PIECE, STORE_BLOCKS, BLOCKS = 3, 48, 6, 10
SECRET, TAG = b"of this fetch", 100
# Two blocks in all layers, after one that another segment has.
TILE, SOURCES, TARGETS = Tile(0, LAYERS, 1, 2), (4, 0), [9, 2, 5]
HASHES = [bytes([number]) * 16 for number in range(3)]
AUTHOR = Author(Authorship(b"of all workers", "worker"), KvNamespace("weights", "bytes", LAYERS, "bytes"))


class Scene:
    def __init__(
        self, checked: bool, store_layers: int = LAYERS, place: Callable[[Pool], KvMemory] = HostMemory
    ) -> None:
        """store_layers: the store may have room for draft layers that the worker has not."""
        self.store = StoreMemory(store_layers, STORE_BLOCKS, PIECE)
        for block in range(STORE_BLOCKS):
            self.store.block(block)[:] = np.random.default_rng(block).bytes(store_layers * PIECE)
        self.array = np.zeros((LAYERS, BLOCKS, PIECE), np.uint8)
        handle = self.store.handle
        assert handle is not None
        self.memory = place(self.array)
        sink = AUTHOR.checks(HASHES) if checked else None
        slab = MappedSlab(handle, self.memory)
        size = TILE.pieces * PIECE
        self.ends: list[Incoming] = []
        self.incoming = Incoming([size], 1.0, [TILE], TAG, SECRET, TARGETS, self.ends.append, sink, slab)
        self.slots = SlotPool([np.zeros(size, np.uint8)] * 2)
        self.refused, self.received = Tally(), Tally()
        self.receiver = Receiver(
            FakeTransport(),
            Mailbox(FakeTransport(), self.refused),
            self.memory,
            self.slots,
            self.refused,
            self.received,
            LocalTcp(None),
        )
        self.receiver.open(self.incoming)
        by_layer = [self.store.pieces(TILE, block)[layer].data for layer in range(LAYERS) for block in SOURCES]
        self.announcement = Announcement(
            segment=0,
            size_bytes=size,
            transport="mapped",
            macs=AUTHOR.writes(HASHES).macs_of(TILE, partial(tags_in, by_layer, TILE)) if checked else (),
            sources=SOURCES,
        )

    def hear(self, **changed: Any) -> None:
        """Let the announcement come, changed so."""
        sealed = seal(Kind.ANNOUNCEMENT, SECRET, msgspec.structs.replace(self.announcement, **changed))
        assert len(sealed) <= self.incoming.max_announcement_bytes
        self.receiver._announced(self.incoming, sealed)
        self.receiver.poll(0.0)

    def take(self, **changed: Any) -> str | None:
        """Let it come, and all be copied. Returns why it was refused."""
        self.hear(**changed)
        for _ in range(4):
            self.receiver.poll(0.0)
        assert self.ends == [self.incoming] and self.slots.free == 2
        assert (self.incoming.failure is None) == (not self.refused.counts)
        return next(iter(self.refused.counts), None)


WAYS = pytest.mark.parametrize("place", [HostMemory, LateMemory], ids=["at once", "later"])


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("store_layers", [LAYERS, LAYERS + 1])
@WAYS
def test_announced_blocks_are_copied_to_their_places_alone(
    checked: bool, store_layers: int, place: Callable[[Pool], KvMemory]
) -> None:
    scene = Scene(checked, store_layers, place)
    assert scene.take() is None
    expected = np.zeros_like(scene.array)
    for target, source in zip(TARGETS[1:], SOURCES, strict=True):
        expected[:, target] = scene.store.pieces(TILE, source)
    assert (scene.array == expected).all()
    assert scene.received.counts == {"mapped": TILE.pieces * PIECE}


def spoil_bytes(scene: Scene) -> dict[str, Any]:
    scene.store.block(SOURCES[1])[LAYERS * PIECE - 1] ^= 1
    return {}


def give_blocks_away(scene: Scene) -> dict[str, Any]:
    """The store's lease has ended, and another block lies there."""
    scene.store.block(SOURCES[0])[:] = scene.store.block(3)
    return {}


def exchange_blocks(scene: Scene) -> dict[str, Any]:
    return {"sources": SOURCES[::-1]}


@pytest.mark.parametrize("change", [spoil_bytes, give_blocks_away, exchange_blocks])
@WAYS
def test_other_bytes_than_the_signed_ones_are_refused(
    change: Callable[[Scene], dict[str, Any]], place: Callable[[Pool], KvMemory]
) -> None:
    scene = Scene(checked=True, place=place)
    assert scene.take(**change(scene)) == WRONG_BLOCK_MAC


@pytest.mark.parametrize("sources", [(), (4,), (4, 0, 1), (4, STORE_BLOCKS), (-1, 0)])
@pytest.mark.parametrize("checked", [False, True])
def test_places_outside_the_slab_are_refused_unread(checked: bool, sources: tuple[int, ...]) -> None:
    scene = Scene(checked)
    assert scene.take(sources=sources) == WRONG_SIZE
    assert not scene.array.any()


def test_a_checked_fetch_takes_nothing_without_macs() -> None:
    assert Scene(checked=True).take(macs=()) == WRONG_BLOCK_MAC


def test_a_slab_of_other_pieces_is_not_mapped() -> None:
    handle = StoreMemory(LAYERS, STORE_BLOCKS, PIECE).handle
    assert handle is not None
    with pytest.raises(OSError, match="another size"):
        MappedSlab(handle, HostMemory(np.zeros((LAYERS, BLOCKS, PIECE + 1), np.uint8)))


def slow_scene() -> tuple[Scene, list[Copying]]:
    """A scene whose segment is announced, and the copy that has begun."""
    scene = Scene(checked=False, place=SlowMemory)
    scene.hear()
    assert isinstance(scene.memory, SlowMemory) and len(scene.memory.copies) == 1 and not scene.ends
    return scene, scene.memory.copies


def test_a_fetch_that_ends_first_waits_for_its_copies() -> None:
    scene, copies = slow_scene()
    scene.receiver.give_up(scene.incoming, "CANCELLED", "")
    assert copies[0].completed and scene.ends == [scene.incoming]


def test_a_copy_that_fails_ends_the_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, copies = slow_scene()
    monkeypatch.setattr(copies[0], "_done", Done(NOT_COPIED))
    scene.receiver.poll(0.0)
    assert scene.refused.counts == {NOT_COPIED: 1}
    assert scene.incoming.failure is not None and "refused: not_copied" in scene.incoming.failure.message


def test_bytes_of_a_segment_that_is_not_sent_are_dropped() -> None:
    scene, _ = slow_scene()
    scene.receiver.accept(Arrival(TAG + 1, TILE.pieces * PIECE, b""))
    assert scene.refused.counts == {"duplicate_segment": 1}
