from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from engine.batcher import MOST_PASSED_OVER, Candidate, Limits, StepPlan, blocks_for, plan_step
from engine.progress import Progress
from engine.standing import ALONE, Standing
from mesh.domain.shares import ONE_TENANT, Share

LIMITS = Limits(max_step_tokens=256, max_requests=8)


@dataclass(eq=False)
class Request:
    arrival: tuple[int, int]
    progress: Progress
    is_pushed: bool = False
    share: Share = ONE_TENANT
    # Tokens of its next row, and drafts behind it.
    draws: int = 1
    most_drafts: int = 0
    # Hashes of its full blocks.
    contents: Sequence[bytes] = ()

    def content(self, index: int) -> bytes | None:
        return self.contents[index] if index < len(self.contents) else None

    @property
    def needs_block(self) -> bool:
        progress = self.progress
        row = self.draws + self.most_drafts if progress.left == 1 else 0
        return progress.computed_at_most + row > progress.covered


def request_of(arrival: tuple[int, int], tokens: int, computed: int = 0, block_ids: Sequence[int] = ()) -> Request:
    progress = Progress([0] * tokens)
    progress.grown(block_ids)
    progress.landed(computed)
    return Request(arrival, progress)


def running(arrival: int, tokens: int, computed: int, block_ids: Sequence[int]) -> Request:
    return request_of((arrival, 0), tokens, computed, block_ids)


def candidate(arrival: int, tokens: int, cached_blocks: int = 0) -> Candidate[Request]:
    new = blocks_for(tokens) - cached_blocks
    return Candidate(request_of((arrival, 0), tokens), range(cached_blocks), new)


def plan(
    decoding: Sequence[Request] = (),
    prompts: Sequence[Request] = (),
    waiting: Iterable[Candidate[Request]] = (),
    free_blocks: int = 100,
    limits: Limits = LIMITS,
    suspended: int = 0,
    standing: Standing = ALONE,
) -> StepPlan[Request]:
    held = [block for request in (*decoding, *prompts) for block in request.progress.block_ids]
    references = [held.count(block) for block in range(max(held, default=0) + 1)]
    return plan_step(decoding, prompts, waiting, free_blocks, references, limits, suspended, standing)


def chunks_of(step: StepPlan[Request]) -> list[tuple[int, int]]:
    return [(chunk.request.arrival[0], chunk.tokens) for chunk in step.chunks]


def test_decoding_requests_come_before_prompts_in_the_budget() -> None:
    decoding = [running(0, 11, 10, [0]), running(1, 11, 10, [1])]
    step = plan(decoding, waiting=[candidate(2, 1000)])
    assert step.decoding == decoding
    assert chunks_of(step) == [(2, 254)]


def test_a_long_prompt_is_computed_in_chunks() -> None:
    prompt = running(0, 600, 256, range(10))
    assert chunks_of(plan(prompts=[prompt])) == [(0, 256)]
    assert chunks_of(plan(prompts=[running(0, 600, 512, range(10))])) == [(0, 88)]


def test_running_prompts_continue_before_new_ones_start() -> None:
    step = plan(prompts=[running(5, 300, 256, range(5))], waiting=[candidate(1, 300)])
    assert chunks_of(step) == [(5, 44), (1, 212)]


def test_of_running_prompts_the_earlier_arrival_goes_first_and_then_the_shorter() -> None:
    late, long, short = (
        running(2, 100, 0, [0, 1]),
        request_of((1, 0), 300, 0, [2, 3, 4, 5, 6]),
        request_of((1, 1), 90, 0, [7, 8]),
    )
    step = plan(prompts=[late, long, short])
    assert [chunk.request for chunk in step.chunks] == [short, long]
    assert [chunk.tokens for chunk in step.chunks] == [90, 166]


def test_a_cached_prefix_is_not_computed() -> None:
    assert chunks_of(plan(waiting=[candidate(0, 200, cached_blocks=3)])) == [(0, 8)]


def test_tokens_that_are_computed_again_wait_for_a_step_that_has_room_for_all_of_them() -> None:
    rewound, fresh = request_of((1, 0), 200, 0, range(4)), replace(candidate(2, 200, cached_blocks=3), computed_again=3)
    rewound.progress.rewind = 3
    rewound.progress.landed(192)
    for left, expected in ((2, []), (3, [(1, 3)]), (13, [(1, 11)]), (14, [(1, 11), (2, 3)])):
        first = running(0, 256 - left, 0, range(4, 8))
        step = plan(prompts=[first, rewound], waiting=[fresh])
        assert chunks_of(step) == [(0, 256 - left), *expected]


def alike(candidate: Candidate[Request], contents: Sequence[bytes]) -> Candidate[Request]:
    """The candidate with a prompt of these blocks."""
    candidate.request.contents = contents
    return replace(candidate, shares_next=True)


def test_a_prompt_waits_for_blocks_that_an_equal_one_computes_in_this_step() -> None:
    first, second, other = (
        alike(candidate(arrival, 100), [content]) for arrival, content in enumerate([b"a", b"a", b"b"])
    )
    step = plan(waiting=[first, second, other])
    assert step.admitted == [first, other]


def test_a_prompt_waits_while_chunks_of_an_equal_one_go_on() -> None:
    long = running(0, 600, 256, range(10))
    long.contents = contents = [bytes([index]) for index in range(9)]
    limits = Limits(max_step_tokens=400, max_requests=8)
    assert (
        plan(prompts=[long], waiting=[alike(candidate(1, 600, cached_blocks=4), contents)], limits=limits).admitted
        == []
    )
    # Its next block is another's.
    unlike = alike(candidate(1, 600, cached_blocks=4), [*contents[:4], b"x"])
    assert plan(prompts=[long], waiting=[unlike], limits=limits).admitted == [unlike]


def test_a_prompt_waits_for_blocks_of_a_step_in_flight() -> None:
    earlier = running(0, 129, 0, range(3))
    earlier.contents = contents = [b"a", b"b"]
    earlier.progress.launched(128, 0, 0)
    waiting = alike(candidate(1, 129), contents)
    assert plan([earlier], waiting=[waiting]).admitted == []
    earlier.progress.committed(128, 0, ())
    earlier.progress.registered(2)
    cached = alike(candidate(1, 129, cached_blocks=2), contents)
    assert plan([earlier], waiting=[cached]).admitted == [cached]


def test_nobody_gives_way_to_a_prompt_that_waits_for_blocks_of_another() -> None:
    busy = [running(arrival, 129, 0, range(3 * arrival, 3 * arrival + 3)) for arrival in range(3)]
    for request in busy:
        request.share = Share("busy")
        request.progress.launched(128, 0, 0)
    busy[0].contents = contents = [b"a", b"b"]
    waiting = candidate(3, 129)
    waiting.request.share = Share("quiet")
    full, standing = Limits(max_step_tokens=256, max_requests=3), Standing({"busy": 400.0}, {"busy": 3})
    assert plan(busy, waiting=[waiting], limits=full, standing=standing).preempted == [busy[2]]
    assert plan(busy, waiting=[alike(waiting, contents)], limits=full, standing=standing).preempted == []


def test_prompts_that_are_passed_over_take_no_places() -> None:
    equal = [alike(candidate(arrival, 100), [b"a"]) for arrival in range(3)]
    other = alike(candidate(3, 100), [b"b"])
    step = plan(waiting=[*equal, other], limits=Limits(max_step_tokens=400, max_requests=2))
    assert step.admitted == [equal[0], other]


def test_few_are_passed_over_in_a_step() -> None:
    read = []

    def queue() -> Iterator[Candidate[Request]]:
        for arrival in range(1000):
            read.append(arrival)
            yield alike(candidate(arrival, 100), [b"a"])

    assert len(plan(waiting=queue(), limits=Limits(10_000, 1000), free_blocks=10_000).admitted) == 1
    # It is read one request further.
    assert len(read) == 1 + MOST_PASSED_OVER + 1


def test_nobody_overtakes_a_waiting_request_that_does_not_fit() -> None:
    step = plan([running(0, 11, 10, [0])], waiting=[candidate(1, 640), candidate(2, 10)], free_blocks=5)
    assert step.admitted == []


def test_admission_leaves_every_running_request_a_block_to_grow_by() -> None:
    decoding = [running(0, 11, 10, [0]), running(1, 11, 10, [1])]
    assert plan(decoding, waiting=[candidate(2, 128)], free_blocks=3).admitted == []
    assert len(plan(decoding, waiting=[candidate(2, 128)], free_blocks=4).admitted) == 1


def test_a_request_that_needs_the_whole_pool_is_admitted_alone() -> None:
    assert len(plan(waiting=[candidate(0, 640)], free_blocks=10).admitted) == 1


def test_no_more_run_than_max_requests() -> None:
    waiting = [candidate(arrival, 10) for arrival in range(20)]
    assert len(plan([running(0, 11, 10, [0])], waiting=waiting).admitted) == LIMITS.max_requests - 1


def test_the_queue_is_read_no_further_than_needed() -> None:
    read = []

    def queue() -> Iterator[Candidate[Request]]:
        for arrival in range(1000):
            read.append(arrival)
            yield candidate(arrival, 200)

    plan(waiting=queue())
    assert len(read) == 3


def test_a_request_at_the_end_of_its_blocks_grows() -> None:
    full, roomy = running(0, 65, 64, [0]), running(1, 64, 63, [1])
    step = plan([full, roomy], free_blocks=1)
    assert step.growing == [full]
    assert step.preempted == []


def test_the_latest_arrival_is_preempted_when_nothing_is_left_to_grow_into() -> None:
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


def test_preempting_one_of_two_who_share_a_block_does_not_free_it() -> None:
    first, second, third = (running(arrival, 129, 128, [0, arrival + 1]) for arrival in range(3))
    step = plan([first, second, third], free_blocks=0)
    # The third gives one block, which both others want.
    assert step.preempted == [third, second]
    assert step.growing == [first]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    first, second = running(0, 65, 64, [0]), running(1, 640, 639, range(1, 11))
    step = plan([first, second], waiting=[candidate(2, 10)], free_blocks=0)
    assert step.preempted == [second]
    assert step.admitted == []


def test_one_that_waits_for_its_kv_takes_blocks_and_no_tokens() -> None:
    landing = replace(candidate(0, 200), waits=True)
    step = plan(waiting=[landing, candidate(1, 100)], free_blocks=7)
    assert step.admitted[0] is landing
    assert chunks_of(step) == [(1, 100)]


def test_one_that_waits_for_its_kv_is_admitted_though_no_tokens_are_left() -> None:
    landing = replace(candidate(1, 200), waits=True)
    step = plan(prompts=[running(0, 600, 0, range(10))], waiting=[landing, candidate(2, 10)])
    assert step.admitted == [landing]


def test_suspended_requests_count_among_those_that_run_and_will_grow() -> None:
    assert plan(waiting=[candidate(0, 10)], suspended=8).admitted == []
    assert plan(waiting=[candidate(0, 64)], free_blocks=3, suspended=3).admitted == []
    assert len(plan(waiting=[candidate(0, 64)], free_blocks=4, suspended=3).admitted) == 1


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


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Request], list[Request], list[Candidate[Request]], int]:
    decoding, prompts, next_block = [], [], 0
    for arrival in draw(st.permutations(range(draw(st.integers(0, 8))))):
        tokens = draw(st.integers(2, 400))
        if draw(st.booleans()):
            blocks = blocks_for(tokens - 1)
            decoding.append(running(arrival, tokens, tokens - 1, range(next_block, next_block + blocks)))
        else:
            blocks = blocks_for(tokens)
            computed = draw(st.integers(0, tokens - 2))
            prompts.append(running(arrival, tokens, computed, range(next_block, next_block + blocks)))
        next_block += blocks
    waiting = [candidate(arrival, draw(st.integers(1, 500))) for arrival in range(10, draw(st.integers(10, 14)))]
    # A request that is alone always fits: the engine refuses others.
    free = draw(st.integers(0 if len(decoding) + len(prompts) > 1 else 8, 12))
    return decoding, prompts, waiting, free


@given(situations())
def test_a_step_keeps_within_its_blocks_and_tokens(
    situation: tuple[list[Request], list[Request], list[Candidate[Request]], int],
) -> None:
    decoding, prompts, waiting, free = situation
    step = plan(decoding, prompts, waiting, free)
    freed = sum(len(request.progress.block_ids) for request in step.preempted)
    taken = sum(admitted.free_blocks_taken for admitted in step.admitted)
    assert len(step.growing) + taken <= free + freed
    assert len(step.decoding) + sum(chunk.tokens for chunk in step.chunks) <= LIMITS.max_step_tokens
    assert all(chunk.tokens > 0 for chunk in step.chunks)


@given(situations())
def test_the_earliest_running_request_always_advances(
    situation: tuple[list[Request], list[Request], list[Candidate[Request]], int],
) -> None:
    decoding, prompts, waiting, free = situation
    step = plan(decoding, prompts, waiting, free)
    everyone = sorted([*decoding, *prompts], key=lambda request: request.arrival)
    advancing = [*step.decoding, *(chunk.request for chunk in step.chunks)]
    assert not everyone or everyone[0] not in step.preempted
    assert all(request in advancing for request in decoding if request not in step.preempted)
    surviving = [request for request in everyone if request in prompts and request not in step.preempted]
    assert not surviving or surviving[0] in advancing


@given(situations())
def test_only_the_latest_are_preempted_and_no_more_than_needed(
    situation: tuple[list[Request], list[Request], list[Candidate[Request]], int],
) -> None:
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


@given(situations())
def test_something_runs_whenever_something_waits(
    situation: tuple[list[Request], list[Request], list[Candidate[Request]], int],
) -> None:
    decoding, prompts, waiting, free = situation
    step = plan(decoding, prompts, waiting, free)
    assert step.decoding or step.chunks or not (decoding or prompts or waiting)
