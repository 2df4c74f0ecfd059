"""A store, or the worker that fetches from it, is killed at each step of a fetch (`make chaos`): what a fetch brings is
right, and what the dead held is free.
"""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from bench.kv_store.worker import KvWorker, attached, offer_all
from kvstore.__main__ import running_store, ucx_agents
from kvstore.config import KvStoreConfig
from mesh.blocks import chain_hashes
from tests.support.forking import FORK
from tests.support.moving_store import CHAIN, LAYERS, PIECE_BYTES, SMALL_SLOTS, small_store
from tests.support.stores import store_stub
from tests.support.waiting import eventually
from transfer.fetch.mapped_slab import MappedSlab
from transfer.ucx import UcxTransport

pytestmark = pytest.mark.check("chaos")

WAYS = pytest.mark.parametrize(
    ("mapped", "secret"),
    [(False, None), (True, None), (False, b"shared by all workers"), (True, b"shared by all workers")],
    ids=["sent", "mapped", "sent, checked", "mapped, checked"],
)
BLOCKS = len(CHAIN)
# What a transfer thread does in a fetch, on either side.
STEPS = ((UcxTransport, "send"), (UcxTransport, "receive"), (MappedSlab, "take"))
# Fewer would mean that no fetch was interrupted.
FEWEST_STEPS = 3
# A fetch, and the leases that the store holds for it, end after so long at the latest.
FETCH_SECONDS = 1.0


class Strike:
    """Kills this process before its next transfer's step of this number, counted from 1."""

    def __init__(self) -> None:
        self.left = 0
        for owner, name in STEPS:
            setattr(owner, name, self._struck(getattr(owner, name)))

    def _struck(self, step: Any) -> Any:
        def struck(*arguments: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*arguments)

        return struck


def worker_of(mapped: bool, secret: bytes | None, fetch_seconds: float = FETCH_SECONDS) -> KvWorker:
    transfer = SMALL_SLOTS.model_copy(update={"map_stores": mapped, "fetch_seconds": fetch_seconds})
    return KvWorker(LAYERS, 2 * BLOCKS, PIECE_BYTES, transfer, secret=secret)


def run_store(pipe: Connection, config: KvStoreConfig) -> None:
    async def serve() -> None:
        async with running_store(config, ucx_agents(config.transfer)) as server:
            pipe.send(server.endpoint)
            await asyncio.Event().wait()

    def strike() -> None:
        found.left = pipe.recv()
        pipe.send(True)

    found = Strike()
    threading.Thread(target=strike, daemon=True).start()
    asyncio.run(serve())


def run_worker(pipe: Connection, endpoint: str, mapped: bool, secret: bytes | None, step: int) -> None:
    async def fetch() -> None:
        worker, strike = worker_of(mapped, secret), Strike()
        async with attached(worker, [endpoint]):
            strike.left = step
            pipe.send((await asyncio.to_thread(worker.fetch, "s", CHAIN, range(BLOCKS, 2 * BLOCKS))).blocks)

    asyncio.run(fetch())


@asynccontextmanager
async def in_a_process(target: Any, *arguments: Any) -> AsyncIterator[tuple[Any, Connection]]:
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()


async def fetch_right(worker: KvWorker, expected: np.ndarray[Any, Any]) -> int:
    """How many blocks of CHAIN came; all that came are right, and nothing is held for the fetch afterwards."""
    fetched = await asyncio.to_thread(worker.fetch, "s", CHAIN, range(BLOCKS, 2 * BLOCKS))
    assert (worker.memory[:, BLOCKS : BLOCKS + fetched.blocks] == expected[:, : fetched.blocks]).all()

    def all_free() -> bool:
        counters = worker.agent.counters()
        return not counters.open_fetches and counters.free_slots == counters.total_slots

    await eventually(all_free)
    return fetched.blocks


def filled(worker: KvWorker) -> np.ndarray[Any, Any]:
    """Gives the worker's first blocks random bytes, those of CHAIN, and returns them."""
    values = np.random.default_rng(0).integers(1, 256, (LAYERS, BLOCKS, PIECE_BYTES), np.uint8)
    worker.memory[:, :BLOCKS] = values
    worker.hold(CHAIN, range(BLOCKS))
    return values


@WAYS
async def test_what_a_killed_store_sent_is_right(mapped: bool, secret: bytes | None) -> None:
    for step in count(1):
        worker = worker_of(mapped, secret)
        expected = filled(worker)
        async with in_a_process(run_store, small_store()) as (store, pipe):
            endpoint = await asyncio.to_thread(pipe.recv)
            async with attached(worker, [endpoint]) as client, store_stub(endpoint) as stub:
                await offer_all(worker, client, stub, CHAIN)
                pipe.send(step)
                assert await asyncio.to_thread(pipe.recv)
                blocks = await fetch_right(worker, expected)
            survived = store.is_alive()
        worker.agent.close()
        if survived:
            assert blocks == BLOCKS and step > FEWEST_STEPS
            return


@WAYS
async def test_a_store_frees_blocks_of_readers_killed_anywhere(mapped: bool, secret: bytes | None) -> None:
    # The dead one may hold slots of the store until its fetch would have ended.
    settings, worker, other = small_store(), worker_of(mapped, secret), worker_of(mapped, secret, 30 * FETCH_SECONDS)
    expected = filled(worker)
    async with (
        running_store(settings, ucx_agents(settings.transfer)) as server,
        attached(worker, [server.endpoint]) as client,
        attached(other, [server.endpoint]),
        store_stub(server.endpoint) as stub,
    ):
        await offer_all(worker, client, stub, CHAIN)
        for step in count(1):
            async with in_a_process(run_worker, server.endpoint, mapped, secret, step) as (reader, pipe):
                await asyncio.to_thread(reader.join)
                blocks = None
                # A process that was killed has told nothing.
                with suppress(EOFError):
                    blocks = pipe.recv()
            if blocks is not None:
                break
            other.memory[:] = 0
            assert await fetch_right(other, expected) == BLOCKS
        assert blocks == BLOCKS and step > FEWEST_STEPS
        # They take the place of all others, so none of those is leased any more.
        later = chain_hashes(range(10_000, 10_000 + 64 * BLOCKS))
        worker.hold(later, range(BLOCKS))
        await offer_all(worker, client, stub, later)
    worker.agent.close()
    other.agent.close()
