"""What a GPU did while some work ran: how long each group of kernels took, and how long the GPU was idle."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Interval:
    """One kernel or copy on the device, in microseconds."""

    name: str
    start: float
    stop: float
    stream: int = 0


@dataclass(frozen=True)
class KernelTrace:
    intervals: Sequence[Interval]

    @property
    def span(self) -> float:
        """Microseconds from the first kernel's start to the last one's end."""
        return max(each.stop for each in self.intervals) - min(each.start for each in self.intervals)

    @property
    def idle_share(self) -> float:
        """The share of the span in which no kernel ran."""
        return 1 - sum(stop - start for start, stop in _union(self.intervals)) / self.span

    def added(self) -> Iterator[tuple[str, float]]:
        """Kernels in the order of their starts, each with the microseconds that it added to its stream.

        A kernel that starts early and waits for the one before counts from the end of that one. Kernels that run at
        once on several streams each count in full.
        """
        latest: defaultdict[int, float] = defaultdict(lambda: float("-inf"))
        for each in sorted(self.intervals, key=lambda interval: interval.start):
            yield each.name, max(each.stop - max(each.start, latest[each.stream]), 0.0)
            latest[each.stream] = max(latest[each.stream], each.stop)

    def by_name(self) -> dict[str, tuple[int, float]]:
        """Number and added microseconds of the kernels of each name, longest first."""
        found: defaultdict[str, list[float]] = defaultdict(list)
        for name, microseconds in self.added():
            found[name].append(microseconds)
        totals = {name: (len(times), sum(times)) for name, times in found.items()}
        return dict(sorted(totals.items(), key=lambda item: -item[1][1]))

    def by_group(self, groups: Mapping[str, str]) -> dict[str, float]:
        """Added microseconds by group, longest first. groups: the pattern of kernel names of each group; the first that
        matches counts.
        """
        times: defaultdict[str, float] = defaultdict(float)
        for kernel, microseconds in self.added():
            group = next((name for name, pattern in groups.items() if re.search(pattern, kernel)), None)
            times[group or f"other: {kernel[:60]}"] += microseconds
        return dict(sorted(times.items(), key=lambda item: -item[1]))


def trace_kernels(work: Callable[[], object]) -> KernelTrace:
    """Trace all that runs on the device until `work` has returned and the device has finished."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.profiler.DeviceType.CUDA]
    return KernelTrace(
        [Interval(each.name, each.time_range.start, each.time_range.end, each.device_resource_id) for each in events]
    )


def _union(intervals: Iterable[Interval]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for each in sorted(intervals, key=lambda interval: interval.start):
        if merged and each.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], each.stop))
        else:
            merged.append((each.start, each.stop))
    return merged
