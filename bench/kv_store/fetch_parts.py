"""Where the time of a fetch goes that copies a store's blocks to a GPU."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import torch

from engine.runner.device_memory import DeviceMemory
from transfer.events import Fetched
from transfer.memory import Check, HostSource, Pending, Pool
from transfer.segments import Tile


@dataclass
class _Copy:
    """One segment: when the call that begins its copies came and ended, in seconds of time.perf_counter, and events
    around what it queued.
    """

    called: float
    returned: float
    first: torch.cuda.Event
    last: torch.cuda.Event


@dataclass
class CopyLog:
    """The copies of the last fetch."""

    copies: list[_Copy] = field(default_factory=list)

    def parts(self, began: float, ended: float, fetched: Fetched) -> dict[str, float]:
        """Milliseconds of a fetch's parts, by name; empty if nothing was mapped. began, ended: as its caller saw it."""
        copies, self.copies = self.copies, []
        if not copies:
            return {}
        torch.cuda.synchronize()
        device = [copy.first.elapsed_time(copy.last) for copy in copies]
        # From the end of a segment's copies to the beginning of the next one's, the link is idle.
        idle = [max(before.last.elapsed_time(after.first), 0.0) for before, after in pairwise(copies)]
        calls = sum(copy.returned - copy.called for copy in copies)
        return {
            "segments": float(len(copies)),
            "whole": (ended - began) * 1e3,
            "until the store's answer": (fetched.answered_seconds or 0.0) * 1e3,
            "until the first copy": (copies[0].called - began) * 1e3,
            "first to last call": (copies[-1].returned - copies[0].called) * 1e3,
            "in calls": calls * 1e3,
            "copies": sum(device),
            "link idle between copies": sum(idle),
            "after the last call": (ended - copies[-1].returned) * 1e3,
        }


class TimedDeviceMemory(DeviceMemory):
    """A GPU's KV memory that logs what is copied from mapped memory."""

    def __init__(self, *planes: torch.Tensor) -> None:
        super().__init__(*planes)
        self.log = CopyLog()

    def host_source(self, mapped: Pool) -> "_TimedSource":
        return _TimedSource(super().host_source(mapped), self.log)


class _TimedSource:
    """A HostSource. Its caller's thread has the stream of the copies as its current one."""

    def __init__(self, source: HostSource, log: CopyLog) -> None:
        self._source = source
        self._log = log

    def copy(
        self, tile: Tile, sources: Sequence[int], blocks: Sequence[int], check: Check | None = None
    ) -> Pending[str | None]:
        called, stream = time.perf_counter(), torch.cuda.current_stream()
        first = stream.record_event(torch.cuda.Event(enable_timing=True))
        copied = self._source.copy(tile, sources, blocks, check)
        last = stream.record_event(torch.cuda.Event(enable_timing=True))
        self._log.copies.append(_Copy(called, time.perf_counter(), first, last))
        return copied


def in_one_line(name: str, rounds: Sequence[dict[str, float]]) -> str:
    """The parts of fetches as medians."""
    parts = {part: median(each[part] for each in rounds) for part in rounds[0]}
    segments, whole = parts.pop("segments"), parts.pop("whole")
    text = ", ".join(f"{part} {value:.2f}" for part, value in parts.items())
    return f"{name}: {segments:.0f} segments in {whole:.2f} ms: {text}"
