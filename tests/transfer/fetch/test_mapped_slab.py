"""Segments that a worker copies out of a store's memory."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.store_memory import StoreMemory
from mesh.domain.kv_identity import KvNamespace
from transfer.block_macs import WRONG_BLOCK_MAC, Author, Authorship
from transfer.fetch.mapped_slab import MappedSlab
from transfer.host_memory import HostMemory
from transfer.incoming import Incoming
from transfer.landing import WRONG_SIZE
from transfer.segments import Tile
from transfer.ticket import Announcement

LAYERS, PIECE, STORE_BLOCKS, BLOCKS = 3, 48, 6, 10
SECRET = b"of this fetch"
# Two blocks in all layers, after one that another segment has.
TILE, SOURCES, TARGETS = Tile(0, LAYERS, 1, 2), (4, 0), [9, 2, 5]
HASHES = [bytes([number]) * 16 for number in range(3)]
AUTHOR = Author(Authorship(b"of all workers", "worker"), KvNamespace("weights", "bytes", LAYERS, "bytes"))


class Scene:
    def __init__(self, checked: bool, store_layers: int = LAYERS) -> None:
        """store_layers: the store may have room for draft layers that the worker has not."""
        self.store = StoreMemory(store_layers, STORE_BLOCKS, PIECE)
        for block in range(STORE_BLOCKS):
            self.store.block(block)[:] = np.random.default_rng(block).bytes(store_layers * PIECE)
        self.array = np.zeros((LAYERS, BLOCKS, PIECE), np.uint8)
        handle = self.store.handle
        assert handle is not None
        memory = HostMemory(self.array)
        sink = AUTHOR.checks(HASHES) if checked else None
        slab = MappedSlab(handle, memory)
        size = TILE.pieces * PIECE
        self.incoming = Incoming([size], 1.0, [TILE], 100, SECRET, TARGETS, lambda _: None, sink, slab)
        self.slab = slab
        by_layer = [self.store.pieces(TILE, block)[layer].data for layer in range(LAYERS) for block in SOURCES]
        self.announcement = Announcement(
            segment=0,
            size_bytes=size,
            checksum=b"",
            transport="mapped",
            macs=AUTHOR.writes(HASHES).macs_of(TILE, lambda: by_layer) if checked else (),
            sources=SOURCES,
        )

    def take(self, **changed: Any) -> str | None:
        announcement = msgspec.structs.replace(self.announcement, **changed)
        assert self.incoming.announce(announcement) is None
        self.incoming.refer(0)
        return self.slab.take(self.incoming, 0)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("store_layers", [LAYERS, LAYERS + 1])
def test_announced_blocks_are_copied_to_their_places_alone(checked: bool, store_layers: int) -> None:
    scene = Scene(checked, store_layers)
    assert scene.take() is None
    expected = np.zeros_like(scene.array)
    for target, source in zip(TARGETS[1:], SOURCES, strict=True):
        expected[:, target] = scene.store.pieces(TILE, source)
    assert (scene.array == expected).all()


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
def test_other_bytes_than_the_signed_ones_are_refused(change: Callable[[Scene], dict[str, Any]]) -> None:
    scene = Scene(checked=True)
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
