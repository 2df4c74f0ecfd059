import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from bench.meshes.processes import CpuMeter, cpu_seconds, family, pin
from tests.support.waiting import wait_until

SPIN = "while True: pass"
SPAWN = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'input()'])"


@contextmanager
def running(code: str) -> Iterator[int]:
    command = [sys.executable, "-c", f"print(flush=True)\n{code}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        # Its interpreter has started.
        process.stdout.readline()
        yield process.pid
    finally:
        for member in family(process.pid):
            member.kill()
        process.communicate()


def test_a_busy_process_uses_cores() -> None:
    with running(SPIN) as busy, running("input()") as idle:
        meter, before = CpuMeter({"busy": busy, "idle": idle}), cpu_seconds(busy)
        # However long a busy machine takes to give it this.
        wait_until(lambda: cpu_seconds(busy) >= before + 0.2)
        cores = meter.cores()
    assert 0 < cores["busy"] <= 1.1
    assert cores["idle"] < cores["busy"] / 2
    assert "client" in cores


def test_pinning_reaches_what_a_process_started() -> None:
    core = min(os.sched_getaffinity(0))
    with running(SPAWN) as parent:
        while len(family(parent)) < 2:
            time.sleep(0.02)
        pin(parent, {core})
        assert [psutil.Process(member.pid).cpu_affinity() for member in family(parent)] == [[core], [core]]
