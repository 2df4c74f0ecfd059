"""Compares the processor time of each test folder with its budget: `make test` is to take at most seven minutes."""

import resource
from collections import defaultdict
from collections.abc import Generator

import pytest

# Seconds of a processor that a folder's tests may take, with those of the processes that they start and wait for. Two
# cores are busy all the time, so a run takes half of the sum. They are a sixth more than each took on a busy machine,
# which changes them little, when they were set. A new capability may add 40 s to all of them together.
BUDGETS = {
    "attacks": 6,
    "bench": 35,
    "capacity": 2,
    "chaos": 2,
    "cli": 9,
    "decode_svc": 7,
    "deploy": 3,
    "engine": 234,
    "eval": 9,
    "gateway": 59,
    "integration": 20,
    "kernels": 165,
    "kvstore": 14,
    "launcher": 10,
    "loadgen": 8,
    "mesh": 11,
    "models": 9,
    "peers_faults": 2,
    "prefill_svc": 5,
    "scheduler": 15,
    "sim": 36,
    "tests": 18,
    "tools": 20,
    "transfer": 13,
    "worker": 15,
}
_NAME = "processor_seconds"


class TestSeconds:
    """A pytest plugin. It prints which folders are over their budgets, but fails nothing, because machines differ."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._before = 0.0

    def pytest_runtest_logstart(self) -> None:
        self._before = _processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = _processor_seconds()
        # A new list: the item's own is that of its other reports too.
        report.user_properties = [*report.user_properties, (_NAME, now - self._before)]
        self._before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        _, _, inside = report.nodeid.partition("@")[0].partition("::")[0].partition("tests/")
        folder = inside.split("/")[0] if "/" in inside else "tests"
        self._seconds[folder] += sum(float(str(value)) for name, value in report.user_properties if name == _NAME)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        over = [
            f"{folder}: {seconds:.0f} s, budget {BUDGETS[folder]} s"
            for folder, seconds in sorted(self._seconds.items())
            if seconds > BUDGETS.get(folder, float("inf"))
        ]
        if over:
            terminalreporter.section("folders over their budget of processor time")
            terminalreporter.write_line("; ".join(over))


def _processor_seconds() -> float:
    """What this process has taken so far, and those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
