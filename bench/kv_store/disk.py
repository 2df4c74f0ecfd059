"""Fetching blocks from a store's disk, compared with the disk's own rate and with the store's memory.

    python -m bench.kv_store.disk DIRECTORY [--blocks 36] [--rounds 5]

DIRECTORY lies on the disk that is measured. A store has memory for two of three chains. Each round fetches the chains
in turn, so that a chain is not in memory when its turn comes, and fetches each again at once, when it is. The medium's
rate is that of direct reads of whole blocks, as many at a time as the store reads, from a file next to the store's, in
the same round. "into memory" is the disk tier alone, in this process: blocks are read, verified and placed, but not
sent. Figures are medians.
"""

import argparse
import asyncio
import os
import secrets
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import uvloop
from deepmesh.internal.v1 import kvstore_pb2_grpc

from bench.kv_store.fetch import HASH_BYTES, PIECE_BYTES
from bench.kv_store.worker import KvWorker, attached, offer_all, store_process, until_written
from kvstore.config import DiskConfig
from kvstore.directory import BlockDirectory
from kvstore.disk.block_file import huge_buffer
from kvstore.disk.tier import DiskTier
from kvstore.store_memory import StoreMemory
from mesh.rpc.channel import Channels
from transfer.config import TransferConfig
from transfer.kept_macs import KeptMacs

CHAINS = 3
# Those of DeepSeek-R1 in bf16: a block has 4.5 MB.
LAYERS = 61
THREADS = 8
BLOCK_BYTES = LAYERS * PIECE_BYTES
# Headers take a page or two of a slot.
SLOT_BYTES = BLOCK_BYTES + (8 << 10)
# Time for the store to free the blocks that it has sent.
SETTLE_SECONDS = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--blocks", type=int, default=36, help="of a chain; %(default)s if not given")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with TemporaryDirectory(dir=arguments.directory) as scratch:
        uvloop.run(compare(Path(scratch), arguments.blocks, arguments.rounds))


async def compare(directory: Path, blocks: int, rounds: int) -> None:
    transfer = TransferConfig(fetch_seconds=60.0)
    worker = KvWorker(LAYERS, (CHAINS + 1) * blocks, PIECE_BYTES, transfer, secret=secrets.token_bytes(32))
    worker.memory[:] = np.random.default_rng(0).integers(0, 256, worker.memory.shape, np.uint8)
    chains = [[secrets.token_bytes(HASH_BYTES) for _ in range(blocks)] for _ in range(CHAINS)]
    target, size_bytes = range(CHAINS * blocks, (CHAINS + 1) * blocks), blocks * BLOCK_BYTES
    settings = {
        "memory_bytes": 2 * size_bytes,
        "disk.path": directory,
        "disk.bytes": (CHAINS * blocks + 8) * SLOT_BYTES,
        "disk.least_uses": 0,
        "disk.threads": THREADS,
    }
    file = directory / "read"
    write_blocks(file, blocks)
    alone = TierAlone(directory, blocks)
    async with (
        store_process(settings) as endpoint,
        Channels().open(endpoint) as channel,
        attached(worker, [endpoint]) as client,
    ):
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        for number, chain in enumerate(chains):
            worker.hold(chain, range(number * blocks, (number + 1) * blocks))
            await offer_all(worker, client, stub, chain)
            await until_written(stub, (number + 1) * blocks)
        store_id, seconds = client.attached[0], []
        for _ in range(rounds + 1):
            for number, chain in enumerate(chains):
                medium = await asyncio.to_thread(read_blocks, file, blocks)
                placed = await asyncio.to_thread(alone.read)
                disk = await asyncio.to_thread(worker.fetch, store_id, chain, target)
                await asyncio.sleep(SETTLE_SECONDS)
                memory = await asyncio.to_thread(worker.fetch, store_id, chain, target)
                await asyncio.sleep(SETTLE_SECONDS)
                assert disk.blocks == memory.blocks == blocks, (disk, memory)
                right = worker.memory[:, number * blocks : (number + 1) * blocks]
                assert (worker.memory[:, target] == right).all()
                seconds.append((medium, placed, disk.seconds, memory.seconds))
    worker.agent.close()
    alone.tier.close()
    report(size_bytes, seconds[CHAINS:])


class TierAlone:
    """A disk tier that reads chains in turn. Its memory holds one and a half of them."""

    def __init__(self, directory: Path, blocks: int) -> None:
        self._directory = BlockDirectory(blocks + blocks // 2)
        memory = StoreMemory(LAYERS, self._directory.total_blocks, PIECE_BYTES)
        config = DiskConfig(path=directory, bytes=(CHAINS * blocks + 8) * SLOT_BYTES, least_uses=0, threads=THREADS)
        self.tier = DiskTier(config, "alone", self._directory, memory, lambda: None)
        self.tier.open(LAYERS, BLOCK_BYTES, KeptMacs(LAYERS, self._directory.total_blocks))
        while not self.tier.total_blocks:
            time.sleep(0.01)
        self._chains = [[secrets.token_bytes(HASH_BYTES) for _ in range(blocks)] for _ in range(CHAINS)]
        for number, chain in enumerate(self._chains, 1):
            reservation = self._directory.reserve(None, chain)
            assert reservation is not None and len(reservation.blocks) == blocks
            self.tier.stored(self._directory.store(reservation.blocks))
            while self.tier.used_blocks < number * blocks:
                time.sleep(0.01)
        self._reads = 0

    def read(self) -> float:
        """Seconds of bringing the next chain into memory."""
        chain, arrived = self._chains[self._reads % CHAINS], threading.Event()
        self._reads += 1

        def told(ready: int, over: bool) -> None:
            assert not over
            if in_memory + ready == len(chain):
                arrived.set()

        began = time.perf_counter()
        held = self._directory.match(chain)
        in_memory = len(held)
        promotion = self.tier.promote(chain[in_memory - 1] if held else None, chain[in_memory:], told)
        assert promotion is not None and in_memory + len(promotion.blocks) == len(chain)
        assert arrived.wait(60)
        seconds = time.perf_counter() - began
        self.tier.release(promotion)
        self._directory.release(held)
        # Blocks that memory had already took no time: scale to the whole chain.
        return seconds * len(chain) / len(promotion.blocks)


def write_blocks(path: Path, blocks: int) -> None:
    with path.open("wb") as file:
        for _ in range(blocks):
            file.write(secrets.token_bytes(BLOCK_BYTES))
        file.flush()
        os.fsync(file.fileno())


def read_blocks(path: Path, blocks: int) -> float:
    """Seconds of reading the whole file, past the page cache."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffers = [memoryview(huge_buffer(BLOCK_BYTES))[:BLOCK_BYTES] for _ in range(THREADS)]

    def read(thread: int) -> None:
        for block in range(thread, blocks, THREADS):
            assert os.preadv(file, [buffers[thread]], block * BLOCK_BYTES) == BLOCK_BYTES

    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read, range(THREADS)))
    seconds = time.perf_counter() - began
    os.close(file)
    return seconds


def report(size_bytes: int, seconds: list[tuple[float, float, float, float]]) -> None:
    """seconds: those of each round, for the medium, the tier alone, a fetch from disk and a fetch from memory."""
    sys.stdout.write(f"{size_bytes / 1e6:.0f} MB")
    names = ("medium", "into memory", "fetch from disk", "fetch from memory")
    for name, own in zip(names, zip(*seconds, strict=True), strict=True):
        ratio = statistics.median(each[0] / one for each, one in zip(seconds, own, strict=True))
        sys.stdout.write(f"   {name} {size_bytes / statistics.median(own) / 1e9:.2f} GB/s, {ratio:.0%}")
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
