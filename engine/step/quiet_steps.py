"""Many decode steps at once, for who knows their tokens beforehand: a simulator."""

from collections.abc import Sequence

from engine.plan.schedule import RequestSchedule
from engine.plan.step_plan import StepPlan
from engine.requests.request import Request
from engine.step.step_work import StepWork
from mesh.blocks import BLOCK_TOKENS

# A request fills a block, and is given one, every 64 steps. In a stretch of this many steps each happens at most once.
STRETCH = BLOCK_TOKENS


def take_quiet_steps(schedule: RequestSchedule, tokens: Sequence[Sequence[int]]) -> Sequence[Request]:
    """Give each request that decodes its tokens, with the same blocks, registered in the same order, as if one step
    after the other were launched and collected. Returns these requests.

    tokens: for each request, one token for each step.
    """
    requests, steps = list(schedule.decoding), len(tokens[0])
    for begin in range(0, steps, STRETCH):
        _take_stretch(schedule, requests, [each[begin : begin + STRETCH] for each in tokens])
    schedule.count(StepWork(requests), steps)
    return requests


def _take_stretch(schedule: RequestSchedule, requests: Sequence[Request], tokens: Sequence[Sequence[int]]) -> None:
    """Take at most STRETCH steps. Each request fills at most one block in them and is given at most one."""
    events, steps = [], len(tokens[0])
    for index, request in enumerate(requests):
        progress = request.progress
        computed = progress.computed
        # A step gives blocks to its rows before it computes them, and registers full blocks afterwards.
        given = progress.covered - computed + 1
        if given <= steps:
            events.append((given, 0, index))
        filled = (progress.registered_blocks + 1) * BLOCK_TOKENS - computed
        if filled <= steps:
            events.append((filled, 1, index))
    taken = dict[int, int]()
    for step, fills, index in sorted(events):
        request = requests[index]
        if fills:
            request.progress.drew(tokens[index][:step], index)
            taken[index] = step
            schedule.register(request)
        else:
            schedule.carry_out(StepPlan([], [], [], [request], []))
    for index, request in enumerate(requests):
        request.progress.drew(tokens[index][taken.get(index, 0) :], index)
