"""Fetching blocks from the KV-cache center, against a copy of the same bytes within one process.

    python -m bench.kv_store.fetch [--blocks 34] [--layers 61] [--rounds 9] [--gpu 0]

A worker and a store are two processes. Mapped, the worker copies blocks from the store's memory into its own, in random
order, and the store confirms that they were leased. Over UCX the store gathers blocks from its slab, hashes and sends
them; the worker verifies and scatters them. "Checked" is a worker that also checks the MAC of every block. Copy is one
array copied to another by one thread, the ceiling; bare is one sent to another over UCX, in messages of a slot's size.
All alternate within one run; figures are medians, and ratios are medians over the rounds.

With --gpu the worker's blocks are on that GPU: what is mapped is copied to a slot there, and page-locked as it is first
read. Copy is one from page-locked memory to the GPU, and there is no bare.
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
from deepmesh.internal.v1 import kvstore_pb2_grpc

from bench.kv_push.bare import BareReceiver, BareSender
from bench.kv_store.lookup import processor_seconds
from bench.kv_store.worker import KvWorker, attached, offer_all, store_process
from mesh.channel import Channels
from transfer.config import TransferConfig
from transfer.host_memory import HostMemory
from transfer.memory import KvMemory
from transfer.tuning import tune_for_gpu_transfers

# A block in one layer: 64 tokens of DeepSeek's latent in bf16.
PIECE_BYTES = 64 * 576 * 2
HASH_BYTES = 16
# The value of UCX_TLS in each comparison; None: the worker maps the store's memory.
WAYS = (None, "tcp", "posix,self")
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
    for way in WAYS:
        config = TransferConfig(
            transports=way, map_stores=way is None, slot_bytes=arguments.slot_bytes, fetch_seconds=60.0
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
    async with (
        store_process(settings) as endpoint,
        Channels().open(endpoint) as channel,
        attached(worker, [endpoint]) as client,
        attached(trusting, [endpoint]),
    ):
        store = next(each for each in psutil.Process().children() if "kvstore" in each.cmdline())
        await offer_all(worker, client, kvstore_pb2_grpc.KvStoreServiceStub(channel), chain)
        target, copy_seconds = random.sample(range(blocks, 2 * blocks), blocks), pools[0].copier(right)
        with ExitStack() as stack:
            peer = (
                None
                if config.transports is None or gpu is not None
                else stack.enter_context(bare_peer(config, size_bytes))
            )
            for _ in range(rounds + 1):
                taken = {"copy": copy_seconds()}
                # Each runs in a thread, so that the event loop can renew the session meanwhile.
                if peer is not None:
                    taken["bare"] = await asyncio.to_thread(peer[0].receive, peer[1])
                for name, each in (("fetch", trusting), ("checked fetch", worker)):
                    before = processor_seconds(store)
                    fetched = await asyncio.to_thread(each.fetch, client.attached[0], chain, target)
                    assert fetched.blocks == blocks, fetched
                    taken[name], used[name] = fetched.seconds, used[name] + processor_seconds(store) - before
                seconds.append(taken)
    for pool in pools:
        assert (pool.read(target) == right).all()
    transport = max(trusting.agent.counters().received_bytes)
    for each in (worker, trusting):
        each.agent.close()
    first = ", ".join(f"{name} {size_bytes / seconds[0][name] / 1e9:.2f}" for name in used)
    sys.stdout.write(f"{transport:6} the first of each: {first} GB/s\n")
    report(transport, size_bytes, seconds[1:], {name: used[name] / len(seconds) for name in used})


class HostPool:
    def place(self, array: np.ndarray[Any, Any]) -> KvMemory:
        self._array = array
        return HostMemory(array)

    def write(self, values: np.ndarray[Any, Any]) -> None:
        """Fill the first blocks."""
        self._array[:, : values.shape[1]] = values

    def read(self, blocks: Sequence[int]) -> np.ndarray[Any, Any]:
        return self._array[:, blocks]

    def copier(self, values: np.ndarray[Any, Any]) -> Callable[[], float]:
        """A function that copies as many bytes at once and returns how many seconds that took."""
        source, target = self._array[:, : values.shape[1]], np.zeros_like(values)

        def copy() -> float:
            began = time.perf_counter()
            target[:] = source
            return time.perf_counter() - began

        return copy


class GpuPool:
    def __init__(self, gpu: str) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        tune_for_gpu_transfers()

    def place(self, array: np.ndarray[Any, Any]) -> KvMemory:
        # Both are imported here, because they need a GPU.
        import torch

        from engine.runner.device_memory import DeviceMemory

        self._torch = torch
        layers, blocks, piece_bytes = array.shape
        self._pool = torch.zeros((layers, blocks, piece_bytes), dtype=torch.uint8, device="cuda")
        return DeviceMemory(self._pool.view(layers, blocks, 64, -1))

    def write(self, values: np.ndarray[Any, Any]) -> None:
        self._pool[:, : values.shape[1]] = self._torch.from_numpy(values).cuda()
        self._torch.cuda.synchronize()

    def read(self, blocks: Sequence[int]) -> np.ndarray[Any, Any]:
        read: np.ndarray[Any, Any] = self._pool[:, list(blocks)].cpu().numpy()
        return read

    def copier(self, values: np.ndarray[Any, Any]) -> Callable[[], float]:
        source = self._torch.from_numpy(values).pin_memory()
        target = self._torch.empty_like(source, device="cuda")

        def copy() -> float:
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            self._torch.cuda.synchronize()
            return time.perf_counter() - began

        return copy


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
