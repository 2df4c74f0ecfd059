"""Compares each test folder's time with its budget: `make test` has to stay below seven minutes on two cores."""

from collections import defaultdict

import pytest

# Seconds that a folder's tests may take, run one after another. Two run at once, so that a run takes half of the sum.
# They are a third more than what each took when they were set. A new capability may add 40 s to all of them together.
BUDGETS = {
    "attacks": 15,
    "bench": 18,
    "capacity": 4,
    "chaos": 10,
    "cli": 18,
    "decode_svc": 60,
    "engine": 115,
    "eval": 40,
    "gateway": 80,
    "integration": 150,
    "kernels": 85,
    "kvstore": 40,
    "launcher": 18,
    "loadgen": 8,
    "mesh": 14,
    "models": 8,
    "peers_faults": 30,
    "prefill_svc": 50,
    "scheduler": 16,
    "sim": 18,
    "tests": 15,
    "tools": 15,
    "transfer": 38,
    "worker": 50,
}


class TestSeconds:
    """A pytest plugin. It prints which folders are over their budgets, but fails nothing, because machines differ."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        _, _, inside = report.nodeid.partition("tests/")
        self._seconds[inside.split("/")[0] if "/" in inside else "tests"] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        over = [
            f"{folder}: {seconds:.0f} s, budget {BUDGETS[folder]} s"
            for folder, seconds in sorted(self._seconds.items())
            if seconds > BUDGETS.get(folder, float("inf"))
        ]
        if over:
            terminalreporter.section("folders over their budget of test time")
            terminalreporter.write_line("; ".join(over))
