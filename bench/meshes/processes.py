"""Resources of processes: the cores they may run on, processor time, memory. A process includes all that it started."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress

import psutil


def family(process_id: int) -> list[psutil.Process]:
    """A process and its descendants."""
    process = psutil.Process(process_id)
    return [process, *process.children(recursive=True)]


def pin(process_id: int, cores: set[int]) -> None:
    """Keep a process, with its descendants and all their threads, on `cores`."""
    for process in family(process_id):
        for thread in process.threads():
            # Threads come and go; new ones inherit their maker's cores.
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores)


def cpu_seconds(process_id: int) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in family(process_id))


class CpuMeter:
    """Cores in use since it was made, by name, with this process's own as "client": 1.0 is one core kept busy."""

    def __init__(self, process_ids: Mapping[str, int]) -> None:
        self._process_ids = process_ids
        self._before = self._seconds()
        self._started = time.perf_counter()

    def cores(self) -> dict[str, float]:
        elapsed = time.perf_counter() - self._started
        return {name: (seconds - self._before[name]) / elapsed for name, seconds in self._seconds().items()}

    def _seconds(self) -> dict[str, float]:
        others = {name: cpu_seconds(process_id) for name, process_id in self._process_ids.items()}
        return others | {"client": time.process_time()}
