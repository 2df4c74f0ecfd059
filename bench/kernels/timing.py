"""Times a device operation without its launch, by replays of a captured graph."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

# Inputs rotate through several times the second-level cache: repeated runs over one buffer would measure the cache.
ROTATED_BYTES = 512 << 20
MOST_ROTATIONS = 64
REPEATS = 15
WARM_REPLAYS = 3


@dataclass(frozen=True)
class Case:
    """One operation at one shape by one provider, to be timed."""

    # The name in the table: "4096x7168 by 64 tokens".
    shape: str
    # "deepmesh", "deep_gemm", "torch", ...
    provider: str
    # Draws fresh inputs on the current device and returns the call to be timed.
    make: Callable[[], Callable[[], object]]
    # The fewest bytes that must be moved: each input read once, each output written once.
    size_bytes: float
    # 0 if arithmetic is no limit.
    flops: float = 0.0
    # Whether the products may be of FP8 operands.
    fp8: bool = False


def time_case(case: Case) -> float:
    """Median seconds of one call, with rotating inputs."""
    rotations = min(max(int(ROTATED_BYTES // max(case.size_bytes, 1)), 2), MOST_ROTATIONS)
    return time_graph([case.make() for _ in range(rotations)])


def time_graph(calls: Sequence[Callable[[], object]], repeats: int = REPEATS, after_seconds: float = 0.0) -> float:
    """Median seconds of one of `calls`, which are captured one after another and replayed.

    Replays in the first `after_seconds` do not count. The calls must be capturable: no synchronisation with the host,
    no copies from pageable memory.
    """
    graph = capture(calls)
    for _ in range(WARM_REPLAYS):
        graph.replay()
    started = time.perf_counter()
    while time.perf_counter() - started < after_seconds:
        _replay_seconds(graph)
    return median(_replay_seconds(graph) for _ in range(repeats)) / len(calls)


def capture(calls: Iterable[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # First calls compile kernels and make handles and workspaces, which must not happen during capture.
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    milliseconds: float = start.elapsed_time(stop)
    return milliseconds / 1000
