"""What a rank with its KV on a GPU sets for its whole process."""

import ctypes
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from transfer.tuning import IPC_STREAMS, SWITCH_INTERVAL_SECONDS, TIMER_SLACK_NS, tune_for_gpu_transfers

PR_GET_TIMERSLACK = 30
VARIABLE, STREAMS = IPC_STREAMS


@pytest.fixture(autouse=True)
def _undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "set here, so that it is restored")
    monkeypatch.delenv(VARIABLE)
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)


def test_threads_started_later_wait_and_oversleep_less() -> None:
    with ThreadPoolExecutor(1) as main_thread:
        assert main_thread.submit(tune_and_start_a_thread).result() == TIMER_SLACK_NS
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_SECONDS)
    assert os.environ[VARIABLE] == STREAMS


def test_a_variable_of_the_user_stays_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "4")
    with ThreadPoolExecutor(1) as main_thread:
        main_thread.submit(tune_for_gpu_transfers).result()
    assert os.environ[VARIABLE] == "4"


def tune_and_start_a_thread() -> int:
    tune_for_gpu_transfers()
    with ThreadPoolExecutor(1) as transfer_thread:
        return transfer_thread.submit(timer_slack_ns).result()


def timer_slack_ns() -> int:
    return int(ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK))
