"""Compares each test folder's time with its budget: `make test` has to stay below twelve minutes on two cores."""

from collections import defaultdict

import pytest

# Seconds that a folder's tests may take, run one after another. Two run at once, so that a run takes half of the sum.
# A new capability may add 40 s to all of them together.
BUDGETS = {
    "attacks": 20,
    "bench": 25,
    "chaos": 20,
    "cli": 60,
    "decode_svc": 60,
    "engine": 190,
    "eval": 50,
    "gateway": 60,
    "integration": 200,
    "kernels": 80,
    "kvstore": 35,
    "mesh": 30,
    "peers_faults": 30,
    "prefill_svc": 65,
    "scheduler": 25,
    "sim": 20,
    "tests": 15,
    "tools": 30,
    "transfer": 50,
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
