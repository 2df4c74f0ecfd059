"""The parts of a fetch's time, from what was noted of its copies."""

from typing import Any

import pytest
import torch

from bench.kv_store.fetch_parts import CopyLog, _Copy, in_one_line
from transfer.events import Fetched


class Event:
    """At a time of the device, in ms."""

    def __init__(self, at: float) -> None:
        self._at = at

    def elapsed_time(self, later: "Event") -> float:
        return later._at - self._at


def copy_of(called: float, returned: float, first: float, last: float) -> _Copy:
    events: Any = Event(first), Event(last)
    return _Copy(called, returned, *events)


def test_what_the_link_waits_for_is_told_from_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    # The second segment's copies begin when the first one's end, the third one's 5 ms later.
    copies = [copy_of(0.002, 0.003, 0, 10), copy_of(0.004, 0.006, 10, 30), copy_of(0.030, 0.031, 35, 40)]
    log = CopyLog(copies)
    parts = log.parts(0.0, 0.050, Fetched(1, 3, 100, 0.05, None, 3, 0.001))
    assert parts == pytest.approx(
        {
            "segments": 3,
            "whole": 50,
            "until the store's answer": 1,
            "until the first copy": 2,
            "first to last call": 29,
            "in calls": 4,
            "copies": 35,
            "link idle between copies": 5,
            "after the last call": 19,
        }
    )
    assert in_one_line("fetch", [parts]).startswith("fetch: 3 segments in 50.00 ms: until the store's answer 1.00, ")
    assert log.parts(0.0, 0.050, Fetched(1, 3, 100, 0.05, None)) == {}
