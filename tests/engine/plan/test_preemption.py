from hypothesis import given

from engine.plan.step_plan import Limits
from engine.plan.tenants import TenantStanding
from mesh.domain.shares import Share
from tests.support.step_plans import Situation, alike, candidate, plan, running, situations


def test_no_request_gives_way_to_a_prompt_that_awaits_blocks() -> None:
    busy = [running(arrival, 129, 0, range(3 * arrival, 3 * arrival + 3)) for arrival in range(3)]
    for request in busy:
        request.share = Share("busy")
        request.progress.launched(128, 0, 0)
    busy[0].contents = contents = [b"a", b"b"]
    waiting = candidate(3, 129)
    waiting.request.share = Share("quiet")
    full, standing = Limits(max_step_tokens=256, max_requests=3), TenantStanding({"busy": 400.0}, {"busy": 3})
    assert plan(busy, waiting=[waiting], limits=full, standing=standing).preempted == [busy[2]]
    assert plan(busy, waiting=[alike(waiting, contents)], limits=full, standing=standing).preempted == []


def test_the_latest_arrival_is_preempted_when_no_block_is_left() -> None:
    first, second, third = (running(arrival, 65, 64, [arrival]) for arrival in range(3))
    step = plan([second, third, first], free_blocks=1)
    assert step.preempted == [third]
    assert step.decoding == [second, first]
    assert step.growing == [second, first]


def test_a_running_prompt_may_be_preempted_for_an_earlier_request() -> None:
    decoding, prompt = running(0, 65, 64, [0]), running(1, 300, 256, range(1, 6))
    step = plan([decoding], [prompt], free_blocks=0)
    assert step.preempted == [prompt]
    assert step.chunks == []


def test_preempting_one_of_two_frees_no_shared_block() -> None:
    first, second, third = (running(arrival, 129, 128, [0, arrival + 1]) for arrival in range(3))
    step = plan([first, second, third], free_blocks=0)
    # The third request frees one block, and both others want it.
    assert step.preempted == [third, second]
    assert step.growing == [first]


def test_no_request_is_admitted_in_a_step_that_preempts() -> None:
    first, second = running(0, 65, 64, [0]), running(1, 640, 639, range(1, 11))
    step = plan([first, second], waiting=[candidate(2, 10)], free_blocks=0)
    assert step.preempted == [second]
    assert step.admitted == []


def test_a_request_whose_kv_is_being_pushed_is_not_preempted() -> None:
    first, pushed, last = running(0, 65, 64, [0]), running(1, 200, 64, range(1, 5)), running(2, 65, 64, [5])
    pushed.is_pushed = True
    step = plan([first, last], [pushed], free_blocks=0)
    assert step.preempted == [last]
    assert step.decoding == [first]
    assert [chunk.request for chunk in step.chunks] == [pushed]


def test_the_earliest_request_stalls_while_transfers_hold_what_it_needs() -> None:
    first, other = running(0, 65, 64, [0]), running(1, 70, 69, [0, 1])
    step = plan([first], free_blocks=0, suspended=3)
    assert (step.preempted, step.decoding, step.growing) == ([], [], [])
    stalled = running(2, 65, 64, [2])
    other.is_pushed = stalled.is_pushed = True
    step = plan([first, other, stalled], free_blocks=0)
    assert (step.preempted, step.decoding) == ([], [other])


def test_prompts_are_bounded_only_while_somebody_decodes() -> None:
    prompt, decoding = running(0, 200, 64, range(1, 5)), running(1, 66, 65, [5, 6])
    assert plan([decoding], [prompt], most_prompt_tokens=0).chunks == []
    # All requests that decode are preempted for another tenant's prompt.
    waiting = candidate(2, 100)
    prompt.share = decoding.share = Share("busy")
    waiting.request.share = Share("quiet")
    full, standing = Limits(max_step_tokens=256, max_requests=2), TenantStanding({"busy": 400.0}, {"busy": 2})
    step = plan([decoding], [prompt], [waiting], limits=full, standing=standing, most_prompt_tokens=0)
    assert step.preempted == [decoding] and step.chunks
    # In the other case they stall, because the prompt, whose KV is being pushed, holds the blocks that they lack.
    stalled = running(0, 65, 64, [0])
    prompt.is_pushed = True
    step = plan([stalled], [prompt], free_blocks=0, most_prompt_tokens=0)
    assert step.decoding == [] and [chunk.request for chunk in step.chunks] == [prompt]


@given(situations())
def test_only_the_latest_are_preempted_and_no_more_than_needed(situation: Situation) -> None:
    decoding, prompts, waiting, free = situation
    step = plan(decoding, prompts, waiting, free)
    everyone = sorted([*decoding, *prompts], key=lambda request: request.arrival)
    kept = len(everyone) - len(step.preempted)
    assert sorted(step.preempted, key=lambda request: request.arrival) == everyone[kept:]
    if step.preempted:
        spared = step.preempted[-1]
        growing = len(step.growing) + (len(spared.progress.block_ids) * 64 == spared.progress.computed)
        others = sum(len(request.progress.block_ids) for request in step.preempted[:-1])
        assert growing > free + others
