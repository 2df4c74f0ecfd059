"""What stops a service."""

import asyncio
import os
import signal
from collections.abc import Iterator

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
