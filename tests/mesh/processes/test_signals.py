"""What stops a service."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from mesh.processes.signals import stop_signals, until_signal


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    # Whoever started the tests may ignore it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_to_stop_ends_the_wait(number: signal.Signals) -> None:
    waiting = asyncio.ensure_future(until_signal())
    await asyncio.sleep(0)
    os.kill(os.getpid(), number)
    await asyncio.wait_for(waiting, 10)
    # A second one kills.
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_program_of_nohup_outlives_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert signal.SIGHUP not in stop_signals()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert signal.SIGHUP in stop_signals()


# A signal would end it once it has said its id.
PROGRAM = """
import os, signal
from mesh.processes.signals import end_on_signals
end_on_signals()
print(os.getpid(), flush=True)
signal.pause()
"""


def test_a_containers_first_process_ends_before_it_serves() -> None:
    container = [
        "unshare",
        "--user",
        "--map-root-user",
        "--pid",
        "--fork",
        "--kill-child",
        sys.executable,
        "-c",
        PROGRAM,
    ]
    with subprocess.Popen(container, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as made:
        try:
            assert made.stdout is not None
            if not (said := made.stdout.readline()):
                pytest.skip("this system grants no PID namespace")
            assert said == b"1\n"
            [first] = psutil.Process(made.pid).children()
            first.terminate()
            assert made.wait(20) == 128 + signal.SIGTERM
        finally:
            made.kill()
