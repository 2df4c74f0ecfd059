"""Checks of grammars: away from the loop, and by turns among tenants."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from gateway.forms import grammar_checks
from gateway.forms.answer_forms import GrammarForm
from gateway.forms.grammar_checks import GrammarChecks
from mesh.errors import InvalidConstraint, Overloaded
from tests.support.waiting import PATIENCE_SECONDS


class SlowForm(GrammarForm):
    """Takes until its gate is opened."""

    def __init__(self) -> None:
        super().__init__("", "guided_grammar")
        object.__setattr__(self, "gate", threading.Event())

    gate: threading.Event

    def in_lark(self) -> GrammarForm:
        assert self.gate.wait(20)
        return self


@pytest.fixture
def checks() -> Iterator[GrammarChecks]:
    checks = GrammarChecks()
    yield checks
    checks.close()


async def test_a_tenants_slow_grammars_do_not_hold_up_another_tenants(checks: GrammarChecks) -> None:
    slow = [SlowForm() for _ in range(3)]
    reading = [asyncio.create_task(checks.in_lark(form, "alice")) for form in slow]
    await asyncio.sleep(0)
    await checks.check('start: "a"', "m", "guided_grammar", "carol", lambda: 0)
    assert not any(task.done() for task in reading)
    for form in slow:
        form.gate.set()
    assert await asyncio.gather(*reading) == slow


async def test_only_a_slow_grammar_is_the_clients_fault(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "CHECK_SECONDS", 0.05)
    slow = SlowForm()
    first = asyncio.create_task(checks.in_lark(slow, "alice"))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await checks.check('start: "a"', "m", "guided_grammar", "alice", lambda: 0)
    with pytest.raises(InvalidConstraint, match="took longer"):
        await first
    slow.gate.set()
    monkeypatch.setattr(grammar_checks, "CHECK_SECONDS", PATIENCE_SECONDS)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                await checks.check('start: "a"', "m", "guided_grammar", "alice", lambda: 0)
                return
            except Overloaded:
                continue
