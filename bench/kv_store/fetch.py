"""Fetching blocks from the KV-cache center, against a copy of the same bytes within one process.

    python -m bench.kv_store.fetch [--blocks 34] [--layers 61] [--rounds 9] [--gpu 0]

A worker and a store are two processes. Mapped, the worker copies blocks from the store's memory into its own, in random
order, and the store confirms that they were leased. Over UCX the store gathers blocks from its slab, hashes and sends
them; the worker verifies and scatters them. "Checked" is a worker that also checks the MAC of every block. Copy is one
array copied to another by one thread, the ceiling; bare is one sent to another over UCX, in messages of a slot's size.
All alternate within one run; figures are medians, and ratios are medians over the rounds.

With --gpu the worker's blocks are on that GPU: the GPU copies what is mapped, which is page-locked as it is first read.
Copy is one from page-locked memory to the GPU, and there is no bare. "By blocks" is as many bytes as the fetch copies
them, a block with all its layers at a time, from page-locked memory too. A line says where the time of mapped fetches
goes, in ms; "in calls" includes page-locking the first time, and checking MACs. The last line is the question of a
scheduler, over gRPC, how much of the chain the store has.
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import secrets
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import uvloop
from deepmesh.internal.v1 import kvstore_pb2, kvstore_pb2_grpc

from bench.kv_push.bare import BareReceiver, BareSender
from bench.kv_store.lookup import processor_seconds
from bench.kv_store.worker import KvWorker, attached, offer_all, store_process
from mesh.domain import worker_wire
from mesh.rpc.channel import Channels
from transfer.config import TransferConfig
from transfer.events import Fetched
from transfer.host_memory import HostMemory
from transfer.memory import KvMemory
from transfer.segments import Tile
from transfer.shared_memory import SharedMemory
from transfer.tuning import tune_for_gpu_transfers

# A block in one layer: 64 tokens of DeepSeek's latent in bf16.
PIECE_BYTES = 64 * 576 * 2
HASH_BYTES = 16
# The value of UCX_TLS in each comparison, None for UCX's choice, and whether the worker maps the store's memory.
WAYS = ((None, True), (None, False), ("tcp", False), ("posix,self", False))
# What a worker on a GPU adds to the store's transports.
GPU_TRANSPORTS = "cuda_copy,"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=34)
    parser.add_argument("--layers", type=int, default=61, help="of a block; 61 are DeepSeek-R1's")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--gpu", help="a value of CUDA_VISIBLE_DEVICES")
    parser.add_argument("--slot-bytes", type=int, default=TransferConfig().slot_bytes)
    arguments = parser.parse_args()
    for transports, mapped in WAYS:
        config = TransferConfig(
            transports=transports, map_stores=mapped, slot_bytes=arguments.slot_bytes, fetch_seconds=60.0
        )
        uvloop.run(compare(config, arguments.layers, arguments.blocks, arguments.rounds, arguments.gpu))


async def compare(config: TransferConfig, layers: int, blocks: int, rounds: int, gpu: str | None) -> None:
    size_bytes = layers * blocks * PIECE_BYTES
    right = np.random.default_rng(0).integers(0, 256, (layers, blocks, PIECE_BYTES), np.uint8)
    pools = [HostPool() if gpu is None else GpuPool(gpu) for _ in range(2)]
    workers = config
    if gpu is not None and config.transports is not None:
        workers = config.model_copy(update={"transports": GPU_TRANSPORTS + config.transports})
    worker = KvWorker(layers, 2 * blocks, PIECE_BYTES, workers, secret=secrets.token_bytes(32), place=pools[0].place)
    trusting = KvWorker(layers, 2 * blocks, PIECE_BYTES, workers, place=pools[1].place)
    pools[0].write(right)
    chain = [secrets.token_bytes(HASH_BYTES) for _ in range(blocks)]
    worker.hold(chain, range(blocks))
    settings: dict[str, object] = {"memory_bytes": size_bytes, "transfer.slot_bytes": config.slot_bytes}
    if config.transports is not None:
        settings["transfer.transports"] = f"'{config.transports}'"
    seconds: list[dict[str, float]] = []
    used: defaultdict[str, float] = defaultdict(float)
    parts: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    async with (
        store_process(settings) as endpoint,
        Channels().open(endpoint) as channel,
        attached(worker, [endpoint]) as client,
        attached(trusting, [endpoint]),
    ):
        store = next(each for each in psutil.Process().children() if "kvstore" in each.cmdline())
        await offer_all(worker, client, kvstore_pb2_grpc.KvStoreServiceStub(channel), chain)
        target, copies = random.sample(range(blocks, 2 * blocks), blocks), pools[0].copiers(right)
        with ExitStack() as stack:
            peer = None if config.map_stores or gpu is not None else stack.enter_context(bare_peer(config, size_bytes))
            for _ in range(rounds + 1):
                taken = {name: copy() for name, copy in copies.items()}
                # Each runs in a thread, so that the event loop can renew the session meanwhile.
                if peer is not None:
                    taken["bare"] = await asyncio.to_thread(peer[0].receive, peer[1])
                for name, each, pool in (("fetch", trusting, pools[1]), ("checked fetch", worker, pools[0])):
                    before, began = processor_seconds(store), time.perf_counter()
                    fetched = await asyncio.to_thread(each.fetch, client.attached[0], chain, target)
                    ended = time.perf_counter()
                    assert fetched.blocks == blocks, fetched
                    taken[name], used[name] = fetched.seconds, used[name] + processor_seconds(store) - before
                    parts[name].append(pool.parts(began, ended, fetched))
                seconds.append(taken)
            asked = await asked_seconds(kvstore_pb2_grpc.KvStoreServiceStub(channel), worker, chain, rounds)
    for pool in pools:
        assert (pool.read(target) == right).all()
    transport = max(trusting.agent.counters().received_bytes)
    for each in (worker, trusting):
        each.agent.close()
    first = ", ".join(f"{name} {size_bytes / seconds[0][name] / 1e9:.2f}" for name in used)
    sys.stdout.write(f"{transport:6} the first of each: {first} GB/s\n")
    report(transport, size_bytes, seconds[1:], {name: used[name] / len(seconds) for name in used})
    for name, each_round in parts.items():
        if each_round[0]:
            # Imported here, because it needs a GPU.
            from bench.kv_store.fetch_parts import in_one_line

            sys.stdout.write(in_one_line(f"{transport:6} first {name}", each_round[:1]) + "\n")
            sys.stdout.write(in_one_line(f"{transport:6} {name}", each_round[1:]) + "\n")
    sys.stdout.write(f"{transport:6} a scheduler's question {asked * 1e3:.2f} ms\n")


async def asked_seconds(stub: Any, worker: KvWorker, chain: Sequence[bytes], rounds: int) -> float:
    """The median time of asking a store over gRPC how much of a chain it has."""
    request = kvstore_pb2.MatchPrefixRequest(
        kv_namespace=worker_wire.namespace_message(worker.namespace), block_hashes=chain
    )
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        await stub.MatchPrefix(request)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


class HostPool:
    def place(self, array: np.ndarray[Any, Any]) -> KvMemory:
        self._array = array
        return HostMemory(array)

    def write(self, values: np.ndarray[Any, Any]) -> None:
        """Fill the first blocks."""
        self._array[:, : values.shape[1]] = values

    def read(self, blocks: Sequence[int]) -> np.ndarray[Any, Any]:
        return self._array[:, blocks]

    def parts(self, began: float, ended: float, fetched: Fetched) -> dict[str, float]:
        """Where the time of the last fetch went, if that is known here."""
        return {}

    def copiers(self, values: np.ndarray[Any, Any]) -> dict[str, Callable[[], float]]:
        """Functions that copy as many bytes and return how many seconds that took, by name."""
        source, target = self._array[:, : values.shape[1]], np.zeros_like(values)

        def copy() -> float:
            began = time.perf_counter()
            target[:] = source
            return time.perf_counter() - began

        return {"copy": copy}


class GpuPool:
    def __init__(self, gpu: str) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        tune_for_gpu_transfers()

    def place(self, array: np.ndarray[Any, Any]) -> KvMemory:
        # Imported here, because they need a GPU.
        import torch

        from bench.kv_store.fetch_parts import TimedDeviceMemory

        self._torch = torch
        layers, blocks, piece_bytes = array.shape
        self._pool = torch.zeros((layers, blocks, piece_bytes), dtype=torch.uint8, device="cuda")
        self._memory = TimedDeviceMemory(self._pool.view(layers, blocks, 64, -1))
        return self._memory

    def parts(self, began: float, ended: float, fetched: Fetched) -> dict[str, float]:
        return self._memory.log.parts(began, ended, fetched)

    def write(self, values: np.ndarray[Any, Any]) -> None:
        self._pool[:, : values.shape[1]] = self._torch.from_numpy(values).cuda()
        self._torch.cuda.synchronize()

    def read(self, blocks: Sequence[int]) -> np.ndarray[Any, Any]:
        read: np.ndarray[Any, Any] = self._pool[:, list(blocks)].cpu().numpy()
        return read

    def copiers(self, values: np.ndarray[Any, Any]) -> dict[str, Callable[[], float]]:
        from engine.runner.device_source import DeviceSource

        torch, (layers, blocks, _) = self._torch, values.shape
        source = torch.from_numpy(values).pin_memory()
        target = torch.empty_like(source, device="cuda")
        # As a store has them. The first copy page-locks them.
        shared = SharedMemory(values.nbytes).array.reshape(blocks, layers, -1)
        shared[:] = values.transpose(1, 0, 2)
        rows = DeviceSource(shared, [target], torch.cuda.current_stream())

        def timed(copy: Callable[[], object]) -> float:
            torch.cuda.synchronize()
            began = time.perf_counter()
            copy()
            torch.cuda.synchronize()
            return time.perf_counter() - began

        tile, every = Tile(0, layers, 0, blocks), range(blocks)
        return {
            "copy": lambda: timed(lambda: target.copy_(source, non_blocking=True)),
            "by blocks": lambda: timed(lambda: rows.copy(tile, every, every)),
        }


def report(transport: str, size_bytes: int, rounds: list[dict[str, float]], used: dict[str, float]) -> None:
    """rounds: the seconds of each round, by what was timed; used: processor time of both processes, in seconds.

    Where neither waits for the other, two cores bring twice the bytes that a second of processor time brings.
    """
    sys.stdout.write(f"{transport:6} {size_bytes / 1e6:.0f} MB")
    for name in rounds[0]:
        rate = size_bytes / statistics.median(each[name] for each in rounds) / 1e9
        ratio = statistics.median(each["copy"] / each[name] for each in rounds)
        sys.stdout.write(f"   {name} {rate:5.2f} GB/s, {ratio:.0%}")
        if name in used:
            sys.stdout.write(f", {size_bytes / used[name] / 1e9:.2f} GB a core-second")
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
