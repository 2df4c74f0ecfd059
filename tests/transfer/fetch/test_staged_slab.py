"""Segments that a worker copies from a store's memory to its slots, and from there to its blocks."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.store_memory import StoreMemory
from mesh.domain.kv_identity import KvNamespace
from tests.support.fake_transport import FakeTransmission, FakeTransport
from tests.support.slow_memory import PromptMemory
from transfer.block_macs import WRONG_BLOCK_MAC, Author, Authorship
from transfer.checksum import Bytes
from transfer.fetch.staged_slab import StagedSlab
from transfer.incoming import Incoming
from transfer.landing import WRONG_SIZE
from transfer.mailbox import Mailbox
from transfer.memory import Run
from transfer.origin import LocalTcp
from transfer.receiver import Receiver
from transfer.seal import Kind, seal
from transfer.segments import Tile
from transfer.slots import SlotPool
from transfer.tally import Tally
from transfer.ticket import Announcement
from transfer.transport import Arrival

LAYERS, PIECE, STORE_BLOCKS, BLOCKS, SLOTS = 3, 48, 6, 10, 3
SECRET, TAG = b"of this fetch", 100
SOURCES, TARGETS = (4, 0, 1, 5), [9, 2, 5, 0]
HASHES = [bytes([number]) * 16 for number in range(4)]
AUTHOR = Author(Authorship(b"of all workers", "worker"), KvNamespace("weights", "bytes", LAYERS, "bytes"))
BLOCK_BY_BLOCK = [Tile(0, LAYERS, number, 1) for number in range(4)]
# By layers, and two blocks at a time.
CUTS = [BLOCK_BY_BLOCK, [Tile(0, 2, 0, 4), Tile(2, 1, 0, 4)], [Tile(0, LAYERS, 0, 1), Tile(0, LAYERS, 1, 3)]]


class Scene:
    def __init__(
        self,
        tiles: Sequence[Tile] = BLOCK_BY_BLOCK,
        checked: bool = False,
        store_layers: int = LAYERS,
        memory: type[PromptMemory] = PromptMemory,
    ) -> None:
        """store_layers: the store may have room for draft layers that the worker has not."""
        self.store = StoreMemory(store_layers, STORE_BLOCKS, PIECE)
        for block in range(STORE_BLOCKS):
            self.store.block(block)[:] = np.random.default_rng(block).bytes(store_layers * PIECE)
        self.array = np.zeros((LAYERS, BLOCKS, PIECE), np.uint8)
        handle, worker = self.store.handle, memory(self.array)
        assert handle is not None
        self.refused, self.received, self.slots = Tally(), Tally(), SlotPool(SLOTS)
        self.mailbox = Mailbox(FakeTransport(), self.refused)
        staging = [np.zeros(4 * LAYERS * PIECE, np.uint8) for _ in range(SLOTS)]
        transport, local_tcp = FakeTransport(), LocalTcp(None)
        self.receiver = Receiver(
            transport, self.mailbox, worker, self.slots, staging, self.refused, self.received, local_tcp
        )
        self.tiles, self.checked = tiles, checked
        sizes, sink = [tile.pieces * PIECE for tile in tiles], AUTHOR.checks(HASHES) if checked else None
        slab = StagedSlab(handle, worker)
        self.incoming = Incoming(sizes, 1.0, tiles, TAG, SECRET, TARGETS, lambda _: None, sink, stager=slab)
        self.receiver.open(self.incoming)

    def announcement(self, index: int) -> Announcement:
        tile = self.tiles[index]
        sources = SOURCES[tile.first_block :][: tile.block_count]
        pieces = [self.store.pieces(tile, block) for block in sources]
        by_layer = [each[layer].data for layer in range(tile.layer_count) for each in pieces]
        macs = AUTHOR.writes(HASHES).macs_of(tile, lambda: by_layer) if self.checked else ()
        return Announcement(index, tile.pieces * PIECE, b"", "mapped", macs, sources=sources)

    def hear(self, announcement: Announcement) -> None:
        sealed = seal(Kind.ANNOUNCEMENT, SECRET, announcement)
        assert len(sealed) <= self.incoming.max_announcement_bytes
        self.receiver._announced(self.incoming, sealed)

    def settle(self) -> None:
        while self.receiver.poll(0.0):
            pass

    def take(self, **changed: Any) -> str | None:
        """Why the first segment is refused, whose announcement is changed."""
        self.hear(msgspec.structs.replace(self.announcement(0), **changed))
        self.settle()
        return next(iter(self.refused.counts), None)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("store_layers", [LAYERS, LAYERS + 1])
@pytest.mark.parametrize("tiles", CUTS, ids=["blocks", "layers", "runs"])
def test_announced_segments_land_in_their_places_alone(tiles: list[Tile], store_layers: int, checked: bool) -> None:
    scene = Scene(tiles, checked, store_layers)
    for index in reversed(range(len(tiles))):
        scene.hear(scene.announcement(index))
    scene.settle()
    assert scene.incoming.ended and scene.incoming.failure is None
    expected = np.zeros_like(scene.array)
    for target, source in zip(TARGETS, SOURCES, strict=True):
        expected[:, target] = scene.store.pieces(Tile(0, LAYERS, 0, 1), source)
    assert (scene.array == expected).all()
    assert scene.received.counts == {"mapped": expected[:, TARGETS].size}
    assert (scene.slots.free, scene.slots.quarantined) == (SLOTS, 0)


def spoil_bytes(scene: Scene) -> dict[str, Any]:
    scene.store.block(SOURCES[0])[LAYERS * PIECE - 1] ^= 1
    return {}


def give_the_block_away(scene: Scene) -> dict[str, Any]:
    """The store's lease has ended, and another block lies there."""
    scene.store.block(SOURCES[0])[:] = scene.store.block(3)
    return {}


def name_another_block(scene: Scene) -> dict[str, Any]:
    return {"sources": SOURCES[1:2]}


@pytest.mark.parametrize("change", [spoil_bytes, give_the_block_away, name_another_block])
def test_other_bytes_than_the_signed_ones_never_reach_blocks(change: Callable[[Scene], dict[str, Any]]) -> None:
    scene = Scene(checked=True)
    signed = scene.announcement(0).macs
    assert scene.take(**{"macs": signed} | change(scene)) == WRONG_BLOCK_MAC
    assert scene.incoming.failure is not None and not scene.array.any()
    assert scene.slots.free == SLOTS


def test_a_block_that_no_worker_signed_never_reaches_blocks() -> None:
    scene = Scene(checked=True)
    assert scene.take(macs=()) == WRONG_BLOCK_MAC
    assert not scene.array.any()


@pytest.mark.parametrize("sources", [(), (STORE_BLOCKS,), (-1,), (4, 0)])
def test_places_outside_the_slab_are_refused_unread(sources: tuple[int, ...]) -> None:
    scene = Scene()
    assert scene.take(sources=sources) == WRONG_SIZE
    assert scene.incoming.failure is not None and scene.slots.free == SLOTS


class LateSource:
    """Copies one run when the test says so."""

    def __init__(self, mapped: Bytes) -> None:
        self._mapped = mapped
        self.copies: list[FakeTransmission] = []

    def stage(self, runs: Sequence[Run], staging: Any) -> FakeTransmission:
        (run,) = runs
        payload = self._mapped[run.start :][: run.size_bytes].tobytes()
        self.copies.append(FakeTransmission(staging[run.place :][: run.size_bytes], payload=payload))
        return self.copies[-1]


class LateMemory(PromptMemory):
    source: LateSource

    def host_source(self, mapped: Bytes) -> LateSource:
        LateMemory.source = LateSource(mapped)
        return self.source


def late_scene() -> tuple[Scene, list[FakeTransmission]]:
    """A scene, and the copies that have begun in it."""
    scene = Scene(memory=LateMemory)
    return scene, LateMemory.source.copies


def test_more_segments_than_slots_wait_for_slots() -> None:
    scene, copies = late_scene()
    for index in range(4):
        scene.hear(scene.announcement(index))
    assert len(copies) == SLOTS - 1
    # The list grows meanwhile.
    for copy in copies:
        copy.write()
        copy.finish()
        scene.settle()
    assert len(copies) == 4 and scene.incoming.ended and scene.incoming.failure is None


def test_a_slot_is_quarantined_if_its_fetch_ends_first() -> None:
    scene, copies = late_scene()
    scene.hear(scene.announcement(0))
    scene.receiver.give_up(scene.incoming, "CANCELLED", "")
    assert scene.slots.quarantined == 1
    copies[0].finish()
    scene.receiver.poll(0.0)
    assert (scene.slots.free, scene.slots.quarantined) == (SLOTS, 0)


class NotingSource:
    """Copies nothing."""

    def __init__(self) -> None:
        self.runs: list[Run] = []

    def stage(self, runs: Sequence[Run], staging: Any) -> FakeTransmission:
        self.runs += runs
        return FakeTransmission(staging)


class NotingMemory(PromptMemory):
    source: NotingSource

    def host_source(self, mapped: Bytes) -> NotingSource:
        NotingMemory.source = NotingSource()
        return self.source


def test_neighbouring_blocks_are_copied_as_one_run() -> None:
    scene = Scene([Tile(0, LAYERS, 0, 4)], memory=NotingMemory)
    scene.hear(scene.announcement(0))
    block = LAYERS * PIECE
    assert SOURCES == (4, 0, 1, 5)
    assert NotingMemory.source.runs == [
        Run(4 * block, 0, block),
        Run(0, block, 2 * block),
        Run(5 * block, 3 * block, block),
    ]


def test_a_copy_that_fails_ends_the_fetch() -> None:
    scene, copies = late_scene()
    scene.hear(scene.announcement(0))
    copies[0].finish("the GPU cannot copy it")
    scene.settle()
    assert scene.incoming.failure is not None and "cannot copy" in scene.incoming.failure.message
    assert scene.slots.free == SLOTS


def test_a_message_after_its_announcement_is_dropped() -> None:
    scene = Scene()
    scene.hear(scene.announcement(0))
    scene.receiver.accept(Arrival(TAG + 1, LAYERS * PIECE, b""))
    assert scene.refused.counts == {"duplicate_segment": 1}


def test_a_slab_of_other_pieces_is_not_mapped() -> None:
    handle = StoreMemory(LAYERS, STORE_BLOCKS, PIECE).handle
    assert handle is not None
    with pytest.raises(OSError, match="another size"):
        StagedSlab(handle, PromptMemory(np.zeros((LAYERS, BLOCKS, PIECE + 1), np.uint8)))
