"""Energy of a device by its own counter: what bytes and products take, and the least time of a step at the power limit.

A card at its limit lowers its clocks until what it draws is the limit again. A step then takes as long as its energy
needs, however its kernels overlap.
"""

import ctypes
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType

import torch

from bench.kernels.timing import capture
from bench.rank.triton_reads import read_in_turns
from capacity.floor import Operation

# Seconds for which each load runs, those before it is measured among them, and seconds between samples of the counter.
LOAD_SECONDS, WARM_SECONDS, SAMPLE_SECONDS = 1.1, 0.4, 0.005
# Replays that are queued, so that the device never waits for the host.
AHEAD = 3
# Each kind of load takes some 0.8 ms.
READ_BYTES, COPY_BYTES, GEMM_SIZE, WAIT_CYCLES = 3 << 30, 3 << 30, 8192, 1_500_000
# Bytes that the second-level cache holds, and how often they are read from it; bytes of a program.
CACHED_BYTES, CACHED_READS, PROGRAM_BYTES = 24 << 20, 192, 1 << 14
# What is measured: one kind, or several in turns. Not work with pauses: below its power limit a card keeps its clock
# and voltage up, and the same products take a fifth more energy.
MIXTURES = (
    *("wait", "read", "copy", "cached", "fp8", "bf16"),
    *("read fp8", "read read fp8", "read fp8 fp8", "read bf16", "read cached"),
)


class EnergyCounter:
    """The driver's counter of the energy that the current CUDA device has taken, updated some ten times a second."""

    def __init__(self) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid).removeprefix("GPU-")
        self._call("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}".encode(), ctypes.byref(self._device))

    def joules(self) -> float:
        """Energy since the driver was loaded."""
        value = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(value))
        return value.value / 1000

    def limit_watts(self) -> float:
        """The power above which the card lowers its clocks."""
        value = ctypes.c_uint()
        self._call("nvmlDeviceGetEnforcedPowerLimit", self._device, ctypes.byref(value))
        return value.value / 1000

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._nvml, name)(*arguments)
        if status:
            raise OSError(f"{name} returned {status}")


class PowerMeter:
    """Samples the counter on a thread of its own while it is entered. `watts`: the mean power of that time."""

    def __init__(self, counter: EnergyCounter) -> None:
        self._counter = counter
        self._samples: list[tuple[float, float]] = []
        self._left = threading.Event()
        self.watts = math.nan

    def __enter__(self) -> "PowerMeter":
        self._samples, self._left = [], threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._left.set()
        self._thread.join()
        self.watts = mean_watts(self._samples)

    def _sample(self) -> None:
        while not self._left.wait(SAMPLE_SECONDS):
            self._samples.append((time.perf_counter(), self._counter.joules()))


def mean_watts(samples: Sequence[tuple[float, float]]) -> float:
    """Mean power from the first to the last change of a counter. samples: seconds and joules. NaN with fewer than two
    changes.
    """
    changes = [after for before, after in pairwise(samples) if after[1] != before[1]]
    if len(changes) < 2:
        return math.nan
    (first, least), (last, most) = changes[0], changes[-1]
    return (most - least) / (last - first)


@dataclass(frozen=True)
class Load:
    """What one replay of a load takes, by measurement."""

    name: str
    seconds: float
    watts: float
    # Read from memory, and written there.
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    # Read from the second-level cache, which has them from earlier reads.
    cached_bytes: float = 0.0
    fp8_flops: float = 0.0
    bf16_flops: float = 0.0


@dataclass(frozen=True)
class PowerModel:
    """Energy as a sum: power of a busy but idle chip over the time, and so much for each byte and operation.

    `worst`: the largest relative error of the loads from which it was made.
    """

    limit_watts: float
    idle_watts: float
    joules_per_read_byte: float
    joules_per_written_byte: float
    joules_per_cached_byte: float
    joules_per_fp8_flop: float
    joules_per_bf16_flop: float
    worst: float

    def seconds(self, operations: Sequence[Operation]) -> float:
        """The least time of these operations at the power limit, if nothing else took energy."""
        joules = sum(
            each.size_bytes * self.joules_per_read_byte
            + each.flops * (self.joules_per_fp8_flop if each.fp8 else self.joules_per_bf16_flop)
            for each in operations
        )
        return joules / (self.limit_watts - self.idle_watts)

    def __str__(self) -> str:
        bytes_pj = [
            f"{joules * 1e12:.0f}"
            for joules in (self.joules_per_read_byte, self.joules_per_written_byte, self.joules_per_cached_byte)
        ]
        flops_pj = [f"{joules * 1e12:.3f}" for joules in (self.joules_per_fp8_flop, self.joules_per_bf16_flop)]
        return (
            f"limit {self.limit_watts:.0f} W, idle {self.idle_watts:.0f} W, pJ a byte read, written and read from the"
            f" cache {', '.join(bytes_pj)}, pJ an operation in fp8 and bf16 {', '.join(flops_pj)}; loads differ by up"
            f" to {self.worst:.1%}"
        )


def fit(loads: Sequence[Load], limit_watts: float) -> PowerModel:
    """The model whose energies are nearest to those of the loads, relative to each."""
    rows = [
        (each.seconds, each.read_bytes, each.written_bytes, each.cached_bytes, each.fp8_flops, each.bf16_flops)
        for each in loads
    ]
    matrix = torch.tensor(rows, dtype=torch.float64)
    joules = torch.tensor([each.seconds * each.watts for each in loads], dtype=torch.float64)
    relative = matrix / joules[:, None]
    # Columns of about one: bytes and seconds differ by ten orders of magnitude.
    scales = relative.norm(dim=0)
    found = torch.linalg.lstsq(relative / scales, torch.ones_like(joules)[:, None]).solution[:, 0] / scales
    idle, read, written, cached, fp8, bf16 = found.tolist()
    return PowerModel(
        limit_watts, idle, read, written, cached, fp8, bf16, worst=(relative @ found - 1).abs().max().item()
    )


def measure_power(counter: EnergyCounter) -> tuple[PowerModel, list[Load]]:
    """Measure loads of copies, reads and products, alone and in turns, on the current device, for some ten seconds."""
    device = torch.device("cuda")
    source = torch.randint(-(1 << 31), 1 << 31, (READ_BYTES // 4,), dtype=torch.int32, device=device)
    target = torch.empty(COPY_BYTES // 8, dtype=torch.int32, device=device)
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=device) for _ in range(2))
    wide, narrow, one = (a.bfloat16(), b.bfloat16()), [each.to(torch.float8_e4m3fn) for each in (a, b)], a.new_ones(())

    largest = torch.empty(READ_BYTES // PROGRAM_BYTES, dtype=torch.int32, device=device)

    def read() -> object:
        return read_in_turns[(READ_BYTES // PROGRAM_BYTES,)](source, largest, 1, SIZE=PROGRAM_BYTES // 4)

    def cached() -> object:
        return read_in_turns[(CACHED_BYTES // PROGRAM_BYTES,)](source, largest, CACHED_READS, SIZE=PROGRAM_BYTES // 4)

    def copy() -> object:
        return torch.neg(source[: len(target)], out=target)

    def fp8() -> object:
        return torch._scaled_mm(narrow[0], narrow[1].t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    def bf16() -> object:
        return wide[0] @ wide[1].t()

    def wait() -> object:
        return torch.cuda._sleep(WAIT_CYCLES)

    kinds = {"wait": wait, "read": read, "copy": copy, "cached": cached, "fp8": fp8, "bf16": bf16}
    loads = [_measure(name, [kinds[kind] for kind in name.split()], counter) for name in MIXTURES]
    return fit(loads, counter.limit_watts()), loads


def _measure(name: str, calls: Sequence[Callable[[], object]], counter: EnergyCounter) -> Load:
    graph = capture(calls)
    _replay_for(graph, WARM_SECONDS)
    with PowerMeter(counter) as meter:
        started = time.perf_counter()
        replays = _replay_for(graph, LOAD_SECONDS - WARM_SECONDS)
        seconds = (time.perf_counter() - started) / replays
    copied = name.count("copy") * COPY_BYTES / 2
    narrow, wide = (name.count(kind) * GEMM_SIZE**2 for kind in ("fp8", "bf16"))
    return Load(
        name,
        seconds,
        meter.watts,
        # A product reads both of its operands and writes bfloat16.
        read_bytes=name.count("read") * READ_BYTES + copied + 2 * narrow + 4 * wide,
        written_bytes=copied + 2 * (narrow + wide),
        cached_bytes=name.count("cached") * CACHED_BYTES * CACHED_READS,
        fp8_flops=2 * narrow * GEMM_SIZE,
        bf16_flops=2 * wide * GEMM_SIZE,
    )


def _replay_for(graph: torch.cuda.CUDAGraph, seconds: float) -> int:
    """Returns the number of replays, all of which have ended."""
    ends: list[torch.cuda.Event] = []
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        graph.replay()
        ends.append(torch.cuda.Event(blocking=True))
        ends[-1].record()
        if len(ends) > AHEAD:
            ends[-1 - AHEAD].synchronize()
    torch.cuda.synchronize()
    return len(ends)
