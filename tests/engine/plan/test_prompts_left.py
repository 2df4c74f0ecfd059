"""Which prompts have room on a rank, and what a step leaves of them, by which ranks take turns."""

import pytest

from engine.blocks.kv_pool import BlockPool
from engine.plan.schedule import RequestSchedule
from engine.plan.step_plan import Chunk, Limits, PromptLimits, PromptsAhead, PromptsLeft
from engine.requests.intake import make_request
from engine.step.step_work import StepWork
from tests.support.engines import prompt_of, submit_of


def test_a_prompt_that_was_admitted_has_not_begun() -> None:
    schedule = RequestSchedule(BlockPool(64), Limits(2048, 8), False, lambda request, found: False)
    request = make_request(submit_of(1, prompt_of(300), 10), frozenset(), (0, 0))
    schedule.enqueue(request)
    assert schedule.prompts_left(StepWork()) == PromptsLeft(True, 300, 0)
    # Another rank's prompt goes first.
    schedule.carry_out(schedule.plan(0, PromptLimits(divided_tokens=100, long_tokens=100, turn=False, decodes=True)))
    schedule.run(request)
    assert schedule.prompts_left(StepWork()) == PromptsLeft(False, 300, 0)
    work = StepWork(chunks=[Chunk(request, 200)])
    assert schedule.prompts_left(work) == PromptsLeft(False, 0, 300)
    request.progress.launched(200, 0, 0)
    assert schedule.prompts_left(StepWork()) == PromptsLeft(False, 0, 300)
    assert schedule.prompts_left(StepWork(chunks=[Chunk(request, 100)])) == PromptsLeft(False, 0, 0)


@pytest.mark.parametrize(
    ("blocks", "places", "awaited", "ahead"),
    [
        pytest.param(64, 8, 0, PromptsAhead(1200, 4), id="all"),
        pytest.param(64, 2, 0, PromptsAhead(600, 2), id="places"),
        pytest.param(64, 5, 2, PromptsAhead(900, 3), id="places without those that wait for KV"),
        pytest.param(64, 2, 5, PromptsAhead(0, 0), id="no place"),
        pytest.param(11, 8, 0, PromptsAhead(600, 2), id="blocks"),
    ],
)
def test_prompts_without_room_are_not_ahead(blocks: int, places: int, awaited: int, ahead: PromptsAhead) -> None:
    """Each of four needs five blocks."""
    schedule = RequestSchedule(BlockPool(blocks), Limits(2048, places), False, lambda request, found: False)
    for key in range(4):
        schedule.enqueue(make_request(submit_of(key, prompt_of(300, seed=key), 10), frozenset(), (0, key)))
    assert schedule.prompts_ahead(awaited) == ahead
