"""A KV store that lies: its workers compute again what no worker of their namespace vouches for, and answer rightly."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import msgspec
import pytest

from engine.oracle.tokens import oracle_tokens
from mesh.blocks import chain_hashes
from mesh.domain.targets import StoreTarget
from tests.support.engines import VOCABULARY, oracle_config, prompt_of, submit_of
from tests.support.rank_store import RankStore
from tests.support.ranks import running_rank, until_an_end
from transfer.block_macs import Author, Authorship
from transfer.config import TransferConfig
from transfer.kept_macs import KeptMacs
from transfer.memory import tags_in
from transfer.segments import Tile
from transfer.ticket import BlockMac
from worker.ranks.client import RankClient

TRANSFER = TransferConfig(slot_bytes=1 << 16, slots=4, fetch_seconds=10.0)
BLOCKS, PIECE_BYTES = 6, 512
SECRET = b"of all workers of this mesh"
Lie = Callable[[RankStore], None]


def rank(worker_id: str) -> AbstractAsyncContextManager[RankClient]:
    return running_rank(oracle_config(total_blocks=100, transfer=TRANSFER), Authorship(SECRET, worker_id))


def macs_of(store: RankStore) -> KeptMacs:
    assert store.agent.macs is not None
    return store.agent.macs


def mac_of(store: RankStore, block: int) -> BlockMac:
    mac = macs_of(store)[block]
    assert mac is not None
    return mac


def change_bytes(store: RankStore) -> None:
    store.slab[0, 0, 100] ^= 1


def exchange_blocks(store: RankStore) -> None:
    first, second = mac_of(store, 0), mac_of(store, 1)
    store.slab[:, [0, 1]] = store.slab[:, [1, 0]]
    macs_of(store)[0], macs_of(store)[1] = second, first


def forge_writer(store: RankStore) -> None:
    macs_of(store)[0] = msgspec.structs.replace(mac_of(store, 0), writer="decode-9")


def use_other_namespace(store: RankStore) -> None:
    """The same bytes, hash and writer, vouched for by a worker of other weights."""
    namespace = msgspec.structs.replace(store.namespace, weights_fingerprint="other")
    writing = Author(Authorship(SECRET, "decode-1"), namespace).writes(store.hashes)
    tile = Tile(0, 1, 0, 1)
    (mac,) = writing.macs_of(tile, partial(tags_in, [store.slab[0, 0].data], tile))
    macs_of(store)[0] = mac


def leave_out(store: RankStore) -> None:
    macs_of(store)[0] = None


LIES = (change_bytes, exchange_blocks, forge_writer, use_other_namespace, leave_out)


async def fetched(
    number: int, lie: Lie | None, first: RankClient, second: RankClient, mappable: bool, blocks: int = BLOCKS
) -> None:
    """The second rank answers rightly to a prompt whose blocks the first one offered to a store, and believes all of
    the blocks or, if the store lies, none of them.
    """
    prompt = [number, *prompt_of(64 * blocks + 10)]
    hashes = chain_hashes(prompt)
    store = RankStore(first.ready.namespace, hashes, blocks, PIECE_BYTES, TRANSFER)
    try:
        first.submit(submit_of(number, prompt, 5))
        await until_an_end(first)
        await store.take_offer(first)
        if lie is not None:
            lie(store)
        second.attach_store(store.session(1, mappable))
        second.submit(submit_of(number, prompt, 5, fetch=StoreTarget("store", blocks)))
        transcript = await until_an_end(second)
        second.detach_store("store")
    finally:
        store.agent.close()
    assert transcript.token_ids[number] == oracle_tokens(prompt, 5, VOCABULARY)
    assert transcript.cached_tokens[number] == (64 * blocks if lie is None else 0)


@pytest.mark.parametrize("mappable", [False, True])
async def test_a_block_that_nobody_vouches_for_is_computed_again(mappable: bool) -> None:
    async with rank("decode-1") as first, rank("decode-2") as second:
        for number, lie in enumerate((*LIES, None), 1):
            await fetched(number, lie, first, second, mappable)


@pytest.mark.parametrize("mappable", [False, True])
async def test_a_trusting_worker_takes_blocks_of_others(mappable: bool) -> None:
    # As long as ids get: the MACs of these blocks are more than the checksum of any segment.
    believer = running_rank(oracle_config(total_blocks=100, transfer=TRANSFER))
    async with rank("\N{FLOPPY DISK}" * 256) as first, believer as second:
        await fetched(1, None, first, second, mappable, blocks=20)
