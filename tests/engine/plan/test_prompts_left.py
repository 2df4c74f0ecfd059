"""What a step leaves of the prompts here, by which ranks take turns."""

from engine.blocks.kv_pool import BlockPool
from engine.plan.schedule import RequestSchedule
from engine.plan.step_plan import Chunk, Limits, PromptLimits, PromptsLeft
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
