"""Times each exchange on one rank, and a copy between two GPUs."""

import os

import torch
from torch import distributed

from bench.exchange.cases import Case, cases
from bench.kernels.timing import time_graph
from engine.exchange.interface import RankExchange

# Calls in one graph, each with inputs of its own, for small tensors and for large ones.
CALLS, LARGE_CALLS = 20, 4
LARGE_BYTES = 16 << 20
COPIED_BYTES = 256 << 20


def wire_rate() -> float:
    """Bytes a second of a copy between two GPUs."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source, device="cuda:1")
    seconds: list[float] = []
    for _ in range(10):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        stop.record()
        stop.synchronize()
        seconds.append(start.elapsed_time(stop) / 1000)
    return COPIED_BYTES / min(seconds)


def measure(port: int, exchange: RankExchange) -> dict[str, tuple[int, dict[str, float]]]:
    """By case: the bytes on the wire, and seconds by provider."""
    place = exchange.place
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("nccl", rank=place.rank, world_size=place.layout.world)
    found = {case.name: (case.wire_bytes, _times(case)) for case in cases(exchange)}
    distributed.destroy_process_group()
    exchange.check()
    return found


def _times(case: Case) -> dict[str, float]:
    calls = LARGE_CALLS if case.wire_bytes > LARGE_BYTES else CALLS
    return {name: time_graph([make() for _ in range(calls)]) for name, make in case.providers.items()}
