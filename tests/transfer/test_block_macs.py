from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.kv_identity import KvNamespace
from transfer.block_macs import UNKNOWN_BLOCK_KEY, WRONG_BLOCK_MAC, Author, Authorship, MacSink, Tags
from transfer.kept_macs import Keeping, KeptMacs
from transfer.memory import tags_in
from transfer.segments import Tile, plan_whole
from transfer.ticket import BlockMac

LAYERS, BLOCKS, PIECE = 3, 5, 40
NAMESPACE = KvNamespace("weights", "float32", LAYERS, "mla:8+4")
SECRET = b"of all workers of the mesh"
HASHES = [bytes([number]) * 16 for number in range(BLOCKS)]
KV = np.random.default_rng(0).integers(0, 256, (LAYERS, BLOCKS, PIECE), np.uint8)


def author(
    secret: bytes = SECRET, writer: str = "decode-0", accepted: Sequence[bytes] = (), **changes: object
) -> Author:
    return Author(Authorship(secret, writer, tuple(accepted)), msgspec.structs.replace(NAMESPACE, **changes))


def tags_of(tile: Tile, kv: np.ndarray = KV) -> Tags:
    """Those of pieces as a segment has them."""
    layers = slice(tile.first_layer, tile.first_layer + tile.layer_count)
    window = kv[layers, tile.first_block : tile.first_block + tile.block_count]
    return partial(tags_in, [piece.data for layer in window for piece in layer], tile)


def refusal(sink: MacSink, tile: Tile, macs: Sequence[BlockMac | None], kv: np.ndarray = KV) -> str | None:
    """Why the tile's blocks may not be kept."""
    check = sink.check(tile, macs)
    return check if isinstance(check, str) else check.refusal(tags_of(tile, kv)(check.keyed))


@dataclass
class Store:
    """It got all blocks in one offer, cut for one size of segments, and gives them away cut for another."""

    kept: KeptMacs
    blocks: Sequence[int] = (7, 3, 0, 9, 2)

    @classmethod
    def offered(cls, writer: Author, segment_bytes: int = 1 << 20) -> "Store":
        store, writing = cls(KeptMacs(LAYERS, 10)), writer.writes(HASHES)
        for tile in plan_whole(LAYERS, BLOCKS, PIECE, segment_bytes):
            macs = writing.macs_of(tile, tags_of(tile))
            assert refusal(Keeping(store.kept, store.blocks), tile, macs) is None
        return store

    def given(self, tile: Tile) -> tuple[BlockMac | None, ...]:
        return Keeping(self.kept, self.blocks).macs_of(tile, lambda _: ())


def refusals(
    store: Store, reader: Author, hashes: Sequence[bytes] = HASHES, kv: np.ndarray = KV, segment_bytes: int = 1 << 20
) -> set[str | None]:
    """Why segments that the store sends are not taken for blocks of these hashes; None where one is."""
    tiles = plan_whole(LAYERS, BLOCKS, PIECE, segment_bytes)
    return {refusal(reader.checks(hashes), tile, store.given(tile), kv) for tile in tiles}


def believed(store: Store, reader: Author, **segments: Any) -> bool:
    """Whether each segment is taken."""
    return refusals(store, reader, **segments) == {None}


@given(st.integers(PIECE, 20 * PIECE), st.integers(PIECE, 20 * PIECE))
def test_what_one_worker_writes_another_believes_however_both_cut_it(written: int, read: int) -> None:
    store = Store.offered(author(), written)
    assert believed(store, author(writer="prefill-3"), segment_bytes=read)


@given(st.integers(0, KV.size - 1), st.integers(0, 7))
def test_no_bit_may_change(byte: int, bit: int) -> None:
    changed = KV.copy()
    changed.reshape(-1)[byte] ^= 1 << bit
    assert not believed(Store.offered(author()), author(), kv=changed)


def test_another_blocks_bytes_are_refused_even_with_their_mac() -> None:
    store = Store.offered(author())
    store.blocks = (3, 7, 0, 9, 2)
    assert not believed(store, author(), kv=KV[:, [1, 0, 2, 3, 4]])


def test_layers_may_not_change_places() -> None:
    store = Store.offered(author())
    for block in store.blocks:
        mac = store.kept[block]
        assert mac is not None
        tags = mac.tags[16:32] + mac.tags[:16] + mac.tags[32:]
        store.kept[block] = msgspec.structs.replace(mac, tags=tags)
    assert not believed(store, author(), kv=KV[[1, 0, 2]])


@pytest.mark.parametrize("change", [{"weights_fingerprint": "others"}, {"scale": 2.0}, {"dtype": "bfloat16"}])
def test_blocks_of_another_namespace_are_not_believed(change: dict[str, Any]) -> None:
    assert not believed(Store.offered(author(**change)), author())


def test_blocks_of_another_secret_are_told_from_forged_ones() -> None:
    store = Store.offered(author(secret=b"of somebody else"))
    assert refusals(store, author()) == {UNKNOWN_BLOCK_KEY}
    # One that says it has this secret's key.
    for block in store.blocks:
        mac, own = store.kept[block], Store.offered(author()).kept[block]
        assert mac is not None and own is not None
        store.kept[block] = msgspec.structs.replace(mac, key_id=own.key_id)
    assert refusals(store, author()) == {WRONG_BLOCK_MAC}


def test_a_secret_is_replaced_while_blocks_of_both_are_believed() -> None:
    old, new = b"the one before", b"the one after"
    both_ways = author(old, accepted=[new]), author(new, accepted=[old])
    for written in (author(old), author(new), *both_ways):
        assert all(believed(Store.offered(written), reader) for reader in both_ways)
    assert refusals(Store.offered(both_ways[0]), author(new)) == {UNKNOWN_BLOCK_KEY}
    changed = KV.copy()
    changed[0, 0, 0] ^= 1
    assert refusals(Store.offered(author(old)), both_ways[1], kv=changed) == {WRONG_BLOCK_MAC}


def test_blocks_without_a_key_id_are_checked_with_each_key() -> None:
    store = Store.offered(author(b"the one before"))
    for block in store.blocks:
        mac = store.kept[block]
        assert mac is not None
        store.kept[block] = msgspec.structs.replace(mac, key_id=b"")
    assert believed(store, author(b"the one after", accepted=[b"the one before"]))
    assert refusals(store, author()) == {WRONG_BLOCK_MAC}


def test_base_layers_are_believed_whatever_draft_layers_follow() -> None:
    drafting, plain = author(draft_layers=1), author(layers=LAYERS - 1)
    tile = Tile(0, LAYERS - 1, 0, BLOCKS)
    for writer, reader in ((drafting, plain), (plain, drafting)):
        store, writing = Store(KeptMacs(LAYERS, 10)), writer.writes(HASHES)
        assert refusal(Keeping(store.kept, store.blocks), tile, writing.macs_of(tile, tags_of(tile))) is None
        assert refusal(reader.checks(HASHES), tile, store.given(tile)) is None


def test_draft_layers_are_believed_from_workers_with_as_many_alone() -> None:
    tile = Tile(LAYERS - 1, 1, 0, BLOCKS)
    macs = author(draft_layers=1).writes(HASHES).macs_of(tile, tags_of(tile))
    assert refusal(author(draft_layers=1).checks(HASHES), tile, macs) is None
    for other in (author(), author(draft_layers=2)):
        assert refusal(other.checks(HASHES), tile, macs) == WRONG_BLOCK_MAC
    # A layer of the model is none of drafts, though its bytes are the same.
    base = author().writes(HASHES).macs_of(tile, tags_of(tile))
    assert refusal(author(draft_layers=1).checks(HASHES), tile, base) == WRONG_BLOCK_MAC


@given(st.integers(PIECE, 20 * PIECE), st.integers(PIECE, 20 * PIECE))
def test_blocks_with_draft_layers_are_believed_however_both_cut_them(written: int, read: int) -> None:
    store = Store.offered(author(draft_layers=1), written)
    assert believed(store, author(writer="prefill-3", draft_layers=1), segment_bytes=read)


def test_the_writer_is_who_wrote_it() -> None:
    store = Store.offered(author(writer="decode-1"))
    mac = store.kept[7]
    assert mac is not None and mac.writer == "decode-1"
    store.kept[7] = msgspec.structs.replace(mac, writer="decode-2")
    assert not believed(store, author())


def test_a_block_without_a_mac_is_not_believed() -> None:
    store = Store.offered(author())
    store.kept[9] = None
    assert not believed(store, author())


def test_parts_of_two_offers_are_no_block() -> None:
    """Two workers' bytes of one block may differ, and are never mixed."""
    store, second = Store.offered(author()), author(writer="decode-1").writes(HASHES)
    tile = Tile(2, 1, 0, BLOCKS)
    refusal(Keeping(store.kept, store.blocks), tile, second.macs_of(tile, tags_of(tile)))
    assert not believed(store, author())


def test_what_a_store_sends_instead_of_macs_is_refused() -> None:
    tile = Tile(0, LAYERS, 0, BLOCKS)
    checking = author().checks(HASHES)
    for macs in ((), (BlockMac("w", b"", b""),) * BLOCKS, (BlockMac("w", bytes(16), b""),) * BLOCKS):
        assert refusal(checking, tile, macs) == WRONG_BLOCK_MAC


def test_two_pushes_of_a_block_never_share_a_key() -> None:
    tile, worker = Tile(0, LAYERS, 0, BLOCKS), author()
    first, second = (worker.writes(HASHES).macs_of(tile, tags_of(tile)) for _ in range(2))
    assert not {mac.tags for mac in first} & {mac.tags for mac in second}
