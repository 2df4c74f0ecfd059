"""Fetching blocks from the KV-cache center, against a bare ucxx transfer of the same bytes.

    python -m bench.kv_store.fetch [--blocks 256] [--rounds 9]

A worker and a store are two processes: the store gathers blocks from its slab, hashes and sends them; the worker
verifies and scatters them into blocks in random order. "Checked" is a worker that also checks the MAC of every block.
Bare is one array sent to another, in messages of a slot's size. All alternate within one run; figures are medians, and
the transport is what UCX says that it chose.
"""

import argparse
import asyncio
import multiprocessing
import random
import secrets
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np
import uvloop
from deepmesh.internal.v1 import kvstore_pb2_grpc

from bench.kv_push.bare import BareReceiver, BareSender
from bench.kv_store.worker import KvWorker, attached, offer_all, store_process
from mesh.channel import Channels
from transfer.config import TransferConfig

# Layers of a block, and the bytes of one in one layer: 64 tokens of DeepSeek's latent in bf16.
LAYERS = 8
PIECE_BYTES = 64 * 576 * 2
HASH_BYTES = 16
# The value of UCX_TLS in each comparison.
TRANSPORTS = ("tcp", "posix,self")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    for transports in TRANSPORTS:
        uvloop.run(compare(TransferConfig(transports=transports), arguments.blocks, arguments.rounds))


async def compare(config: TransferConfig, blocks: int, rounds: int) -> None:
    size_bytes = LAYERS * blocks * PIECE_BYTES
    worker = KvWorker(LAYERS, 2 * blocks, PIECE_BYTES, config, secret=secrets.token_bytes(32))
    trusting = KvWorker(LAYERS, 2 * blocks, PIECE_BYTES, config)
    worker.memory[:, :blocks] = np.random.default_rng(0).integers(0, 256, (LAYERS, blocks, PIECE_BYTES), np.uint8)
    chain = [secrets.token_bytes(HASH_BYTES) for _ in range(blocks)]
    worker.hold(chain, range(blocks))
    settings = {"memory_bytes": size_bytes, "transfer.transports": f"'{config.transports}'"}
    async with (
        store_process(settings) as endpoint,
        Channels().open(endpoint) as channel,
        attached(worker, [endpoint]) as client,
        attached(trusting, [endpoint]),
    ):
        await offer_all(worker, client, kvstore_pb2_grpc.KvStoreServiceStub(channel), chain)
        target = random.sample(range(blocks, 2 * blocks), blocks)
        with bare_peer(config, size_bytes) as (receiver, start_sender):
            triples = []
            for _ in range(rounds + 1):
                # Each runs in a thread, so that the event loop can renew the session meanwhile.
                bare = await asyncio.to_thread(receiver.receive, start_sender)
                trusted = await asyncio.to_thread(trusting.fetch, client.attached[0], chain, target)
                checked = await asyncio.to_thread(worker.fetch, client.attached[0], chain, target)
                assert trusted.blocks == checked.blocks == blocks, (trusted, checked)
                triples.append((bare, trusted.seconds, checked.seconds))
    for each in (worker, trusting):
        assert (each.memory[:, target] == worker.memory[:, :blocks]).all()
    transport = max(worker.agent.counters().received_bytes)
    for each in (worker, trusting):
        each.agent.close()
    report(transport, size_bytes, triples[1:])


def report(transport: str, size_bytes: int, triples: list[tuple[float, float, float]]) -> None:
    """triples: seconds of each round, for the bare transfer, a fetch, and a checked fetch."""
    sys.stdout.write(f"{transport:6} {size_bytes / 1e6:.0f} MB")
    for name, seconds in zip(("bare", "fetch", "checked fetch"), zip(*triples, strict=True), strict=True):
        ratio = statistics.median(each[0] / own for each, own in zip(triples, seconds, strict=True))
        rate = size_bytes / statistics.median(seconds) / 1e9
        sys.stdout.write(f"   {name} {rate:5.2f} GB/s, {ratio:.0%}")
    sys.stdout.write("\n")


@contextmanager
def bare_peer(config: TransferConfig, size_bytes: int) -> Iterator[tuple[BareReceiver, Callable[[], None]]]:
    """A receiver in this process, and a function that makes a sender in another process start."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=send_when_told, args=(theirs, config, size_bytes), daemon=True)
    process.start()
    receiver = BareReceiver(config, np.zeros(size_bytes, np.uint8))
    ours.send(receiver.address)
    try:
        yield receiver, lambda: ours.send(True)
    finally:
        process.kill()
        process.join()


def send_when_told(pipe: Connection, config: TransferConfig, size_bytes: int) -> None:
    sender = BareSender(config, np.ones(size_bytes, np.uint8), pipe.recv())
    while pipe.recv():
        sender.send()


if __name__ == "__main__":
    main()
