"""Calls that take turns on one thread."""

import subprocess
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial

import pytest
import torch

from engine.exchange.turns import StepTurns
from mesh.errors import RankLost


def test_calls_run_by_turns_until_each_has_ended() -> None:
    turns, seen = StepTurns(), list[str]()

    def call(name: str, waits: int) -> str:
        for number in range(waits):
            seen.append(f"{name}{number}")
            assert turns.taken and turns.parts == 3 and turns.part == "abc".index(name)
            turns.wait()
        return name

    assert turns.take([partial(call, *each) for each in (("a", 3), ("b", 1), ("c", 2))]) == ["a", "b", "c"]
    assert seen == ["a0", "b0", "c0", "a1", "c1", "a2"]


def test_one_call_waits_for_no_turn() -> None:
    turns = StepTurns()
    assert turns.take([turns.wait]) == [None] and not turns.taken


def test_an_error_ends_the_calls_that_wait() -> None:
    turns, ended = StepTurns(), list[str]()

    def wait() -> None:
        try:
            turns.wait()
        finally:
            ended.append("waiting")

    def fail() -> None:
        raise RankLost("a rank has ended")

    calls: list[Callable[[], None]] = [wait, fail, partial(ended.append, "not begun")]
    with pytest.raises(RankLost):
        turns.take(calls)
    assert ended == ["waiting"] and not turns.taken
    assert turns.take([turns.wait, turns.wait]) == [None, None]


def test_calls_see_the_callers_context_and_inference_mode() -> None:
    turns, variable = StepTurns(), ContextVar[str]("variable")
    variable.set("the caller's")

    def seen() -> tuple[str, bool]:
        turns.wait()
        return variable.get(), torch.is_inference_mode_enabled()

    with torch.inference_mode():
        assert turns.take([seen, seen]) == [("the caller's", True)] * 2


def test_a_rank_that_takes_no_turns_imports_no_greenlet() -> None:
    code = "import sys, engine.exchange.turns; sys.exit('greenlet' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
