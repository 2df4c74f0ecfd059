import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.workers import MAX_RANKS, RankStatus, TransferCounters, WorkerLoad, WorkerState
from worker import status_report as report_module
from worker.status_report import StatusReport

LOAD = WorkerLoad(1, 2, 3, 4, 5.0, 6.0, 7.0)


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def observe(status: StatusReport, stored: list[bytes] | None = None, removed: list[bytes] | None = None) -> None:
    status.observe(LOAD, stored or [], removed or [])


def test_a_worker_that_did_nothing_reports_a_free_pool() -> None:
    told = StatusReport(100).next_report(snapshot=True)
    assert (told.load.free_blocks, told.state, told.snapshot, told.stored) == (
        100,
        WorkerState.SERVING,
        True,
        [],
    )


def test_a_change_is_reported_once_and_net() -> None:
    status = StatusReport(100)
    observe(status, stored=hashes(1, 2))
    observe(status, stored=hashes(3), removed=hashes(1))
    told = status.next_report(snapshot=False)
    assert told.load == LOAD
    assert (set(told.stored), told.removed) == (set(hashes(2, 3)), [])
    observe(status, removed=hashes(2))
    told = status.next_report(snapshot=False)
    assert (told.stored, told.removed) == ([], hashes(2))
    again = status.next_report(snapshot=False)
    assert (again.stored, again.removed) == ([], [])


def test_a_snapshot_is_everything_there_is_now() -> None:
    status = StatusReport(100)
    observe(status, stored=hashes(1, 2))
    status.next_report(snapshot=False)
    observe(status, removed=hashes(1))
    told = status.next_report(snapshot=True)
    assert (told.stored, told.removed) == (hashes(2), [])


def test_a_long_list_takes_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "MESSAGE_HASHES", 2)
    status = StatusReport(100)
    observe(status, stored=hashes(*range(5)))
    told = [status.next_report(snapshot=True), status.next_report(snapshot=False), status.next_report(snapshot=False)]
    assert [len(each.stored) for each in told] == [2, 2, 1]


def test_a_stalled_worker_serves_again_unless_it_drains() -> None:
    status = StatusReport(100)
    states = []
    for stalled in (True, False):
        status.set_stalled(stalled)
        states.append(status.next_report(snapshot=False).state)
    assert states == [WorkerState.STALLED, WorkerState.SERVING]
    status.drain()
    status.set_stalled(True)
    assert status.next_report(snapshot=False).state is WorkerState.DRAINING


def test_a_block_that_came_and_went_is_not_reported() -> None:
    status = StatusReport(100)
    observe(status, stored=hashes(1))
    status.next_report(snapshot=True)
    for _ in range(3):
        observe(status, stored=hashes(2), removed=hashes(1))
        observe(status, stored=hashes(1), removed=hashes(2))
    told = status.next_report(snapshot=False)
    assert (told.stored, told.removed) == ([], [])


async def test_waiting_ends_with_a_change_and_only_then() -> None:
    status = StatusReport(100)
    status.next_report(snapshot=True)
    waiting = asyncio.create_task(status.wait(30))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    observe(status)
    await asyncio.wait_for(waiting, 20)
    status.next_report(snapshot=False)
    waiting = asyncio.create_task(status.wait(30))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    status.drain()
    await asyncio.wait_for(waiting, 20)
    assert status.next_report(snapshot=False).state is WorkerState.DRAINING


async def test_waiting_ends_with_its_time() -> None:
    status = StatusReport(100)
    status.next_report(snapshot=True)
    await status.wait(0.01)


BLOCKS, RANKS = st.sets(st.integers(0, 9)), 3
# The bits of their host memories.
HOST = range(MAX_RANKS, MAX_RANKS + RANKS)
steps = st.lists(
    st.tuples(st.integers(0, RANKS - 1), st.booleans(), BLOCKS, BLOCKS, st.sampled_from(["", "take", "snapshot"])),
    max_size=30,
)


@given(steps)
def test_reports_tell_exactly_the_blocks_of_each_rank(
    events: list[tuple[int, bool, set[int], set[int], str]],
) -> None:
    statuses = [RankStatus(LOAD, TransferCounters(), 0)] * RANKS
    # What each rank has in its pool, and in host memory.
    status, memories = StatusReport(100, statuses), {number: set[bytes]() for number in (*range(RANKS), *HOST)}
    scheduler: dict[bytes, int] = {}
    for number, hosted, stored, removed, then in [*events, (0, False, set[int](), set[int](), "take")]:
        memory = memories[HOST[number] if hosted else number]
        # As the rank tells it: what it stores was not there, what it removes was.
        came, went = list(set(hashes(*stored)) - memory), list(set(hashes(*removed)) & memory)
        if hosted:
            status.observe(LOAD, [], [], rank=number, ranks=statuses, hosted=came, unhosted=went)
        else:
            status.observe(LOAD, came, went, rank=number, ranks=statuses)
        memory.difference_update(went)
        memory.update(came)
        if then:
            told = status.next_report(snapshot=then == "snapshot")
            scheduler = {} if told.snapshot else scheduler
            for block in told.removed:
                scheduler.pop(block, None)
            scheduler.update(zip(told.stored, told.holders, strict=True))
    for bit, memory in memories.items():
        assert {block for block, holders in scheduler.items() if holders >> bit & 1} == memory
    assert all(scheduler.values())


def test_transfers_stay_as_last_reported() -> None:
    status, counters = StatusReport(100), TransferCounters(open_landings=1, sent_bytes={"tcp": 1024})
    status.observe(LOAD, [], [], counters)
    status.observe(LOAD, [], [])
    assert status.next_report(snapshot=False).transfers == counters


def test_each_scheduler_is_told_its_own_changes() -> None:
    first = StatusReport(100)
    first.observe(WorkerLoad(), [b"a"], [])
    second = first.follower()
    assert first.next_report(snapshot=True).stored == second.next_report(snapshot=True).stored == [b"a"]
    first.observe(WorkerLoad(running_requests=1), [b"b"], [b"a"])
    for report in (first.next_report(snapshot=False), second.next_report(snapshot=False)):
        assert (report.stored, report.removed, report.load.running_requests) == ([b"b"], [b"a"], 1)
    first.drain()
    assert second.next_report(snapshot=False).state is WorkerState.DRAINING
