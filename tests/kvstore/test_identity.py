"""All pairs of unlike workers on one store: each finds the KV that means the same to it, and no other."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from deepmesh.internal.v1 import kvstore_pb2

from bench.kv_store.worker import KvWorker, attached, offer_all
from kvstore.__main__ import running_store, ucx_agents
from kvstore.client import StoreClient
from kvstore.config import KvStoreConfig
from mesh.blocks import chain_hashes
from mesh.domain import worker_wire
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.errors import NamespaceMismatch
from tests.support.moving_store import SMALL_SLOTS
from tests.support.stores import store_config, store_stub

BASE_LAYERS, STORE_DRAFTS, PIECE_BYTES, CHAIN_BLOCKS = 3, 1, 1 << 12, 3
# Sparse attention begins in a chain's second block.
SPARSE_FROM = 64


@dataclass(frozen=True)
class Kind:
    """A kind of worker, and of the requests that it serves. By default its KV means what the reference's does."""

    meaning: dict[str, Any] = field(default_factory=dict)
    draft_layers: int = 0
    salt: bytes = b""
    sparse: SparsePrefill | None = None

    def chain(self, first_token: int) -> list[bytes]:
        return chain_hashes(range(first_token, first_token + 64 * CHAIN_BLOCKS), self.salt, self.sparse)


KINDS = {
    "reference": Kind(),
    "its-equal": Kind(),
    "one-draft": Kind(draft_layers=1),
    "another-with-one-draft": Kind(draft_layers=1),
    "two-drafts": Kind(draft_layers=2),
    "weights": Kind({"weights": "other"}),
    "declared-name": Kind({"weights": "declared: weights"}),
    "dtype": Kind({"dtype": "float8_e4m3fn"}),
    "scale": Kind({"scale": 0.5}),
    "layout": Kind({"layout": "other"}),
    "salt": Kind(salt=b"of a tenant"),
    "another-salt": Kind(salt=b"of another tenant"),
    "sparse": Kind(sparse=SparsePrefill(SPARSE_FROM, 0.9)),
    "another-recall": Kind(sparse=SparsePrefill(SPARSE_FROM, 0.8)),
}


def shared(writer: Kind, reader: Kind) -> tuple[int, int]:
    """How many of the writer's blocks mean the same to the reader, and how many of these have draft layers."""
    if (writer.meaning, writer.salt) != (reader.meaning, reader.salt):
        return 0, 0
    blocks = CHAIN_BLOCKS if writer.sparse == reader.sparse else SPARSE_FROM // 64
    return blocks, blocks if writer.draft_layers == reader.draft_layers == STORE_DRAFTS else 0


def roomy_store() -> KvStoreConfig:
    blocks = 2 * CHAIN_BLOCKS * len(KINDS)
    room = blocks * (BASE_LAYERS + STORE_DRAFTS) * PIECE_BYTES
    return store_config(memory_bytes=room, draft_layers=STORE_DRAFTS, transfer=SMALL_SLOTS.model_dump())


def worker_of(kind: Kind) -> KvWorker:
    layers, meaning = BASE_LAYERS + kind.draft_layers, {"weights": "weights", **kind.meaning}
    return KvWorker(layers, 2 * CHAIN_BLOCKS, PIECE_BYTES, SMALL_SLOTS, draft_layers=kind.draft_layers, **meaning)


async def fetched_of(writer: KvWorker, reader: KvWorker, chain: list[bytes], store_id: str) -> tuple[int, int]:
    """How many blocks the reader fetched, and how many with draft layers; asserts that they hold the writer's bytes."""
    fetched = await asyncio.to_thread(reader.fetch, store_id, chain, range(CHAIN_BLOCKS, 2 * CHAIN_BLOCKS))
    for blocks, layers in (
        (fetched.blocks, range(BASE_LAYERS)),
        (fetched.drafted, range(BASE_LAYERS, BASE_LAYERS + STORE_DRAFTS)),
    ):
        for layer in layers if blocks else ():
            received = reader.memory[layer, CHAIN_BLOCKS : CHAIN_BLOCKS + blocks]
            assert (received == writer.memory[layer, :blocks]).all()
    return fetched.blocks, fetched.drafted


async def test_every_pair_shares_exactly_what_means_the_same() -> None:
    settings, random = roomy_store(), np.random.default_rng(0)
    expected, found = {}, {}
    async with (
        running_store(settings, ucx_agents(settings.transfer)) as server,
        store_stub(server.endpoint) as stub,
        AsyncExitStack() as stack,
    ):
        workers: dict[str, tuple[KvWorker, StoreClient]] = {}
        for name, kind in KINDS.items():
            worker = worker_of(kind)
            stack.callback(worker.agent.close)
            workers[name] = worker, await stack.enter_async_context(attached(worker, [server.endpoint]))
        for number, (writer, (worker, client)) in enumerate(workers.items()):
            # Tokens of its own, so that nothing of an earlier pair is found.
            first_token = 1000 * number
            chain = KINDS[writer].chain(first_token)
            worker.memory[:, :CHAIN_BLOCKS] = random.integers(1, 256, worker.memory[:, :CHAIN_BLOCKS].shape, np.uint8)
            worker.hold(chain, range(CHAIN_BLOCKS))
            await offer_all(worker, client, stub, chain)
            for reader, (other, _) in workers.items():
                asked = KINDS[reader].chain(first_token)
                found[writer, reader] = await fetched_of(worker, other, asked, "s")
                expected[writer, reader] = shared(KINDS[writer], KINDS[reader])
    assert found == expected


@pytest.mark.parametrize(("layers", "draft_layers"), [(4, 0), (3, 1), (2, 0)])
async def test_workers_with_other_base_layers_need_another_store(layers: int, draft_layers: int) -> None:
    settings = roomy_store()
    first, other = worker_of(Kind()), KvWorker(layers, 1, PIECE_BYTES, SMALL_SLOTS, draft_layers=draft_layers)
    async with (
        running_store(settings, ucx_agents(settings.transfer)) as server,
        attached(first, [server.endpoint]),
        store_stub(server.endpoint) as stub,
    ):
        with pytest.raises(NamespaceMismatch, match="a store of its own"):
            await stub.AttachWorker(
                kvstore_pb2.AttachWorkerRequest(worker=worker_wire.identity_message(other.identity))
            )
    for worker in (first, other):
        worker.agent.close()
