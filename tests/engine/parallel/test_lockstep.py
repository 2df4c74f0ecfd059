"""Ranks that agree on steps over host memory."""

import select
import threading
import time

import pytest

from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from engine.step.shape import StepShape
from mesh.errors import RankLost
from tests.support.rank_threads import on_each_rank
from tests.support.shapes import decoding

# A rank looks for the others' proposals, and then falls asleep long before this many seconds have passed.
ASLEEP = 0.2


def test_ranks_agree_on_a_shape_that_holds_all_proposals() -> None:
    proposals = [StepShape(6, drafts=1, rows=3), StepShape(300, decode_only=False), StepShape(0, stopping=True)]
    agreed = on_each_rank(Layout(dp=3, ep=1), lambda peers: peers.steps.agree(proposals[peers.place.rank]))
    assert agreed == [StepShape(300, decode_only=False, drafts=1, rows=3)] * 3


def test_repeated_proposals_add_up_their_waiting_prompts() -> None:
    def act(peers: Peers) -> list[StepShape]:
        return [peers.steps.agree(StepShape(7, waiting_prompts=waiting)) for waiting in (0, 0, 1, 1, 0)]

    agreed = [StepShape(7, waiting_prompts=waiting) for waiting in (0, 0, 3, 3, 0)]
    assert on_each_rank(Layout(dp=3), act) == [agreed] * 3


def test_ranks_stop_when_all_want_to() -> None:
    agreed = on_each_rank(Layout(dp=2), lambda peers: peers.steps.agree(StepShape(0, stopping=True)))
    assert [shape.stopping for shape in agreed] == [True, True]


@pytest.mark.parametrize("ranks", [2, 3])
def test_many_agreements_follow_one_another_in_order(ranks: int) -> None:
    def act(peers: Peers) -> list[int]:
        return [peers.steps.agree(decoding(step * 10 + peers.place.rank)).tokens for step in range(200)]

    assert on_each_rank(Layout(dp=ranks), act) == [[step * 10 + ranks - 1 for step in range(200)]] * ranks


def test_a_proposal_wakes_others_and_waits_for_answers() -> None:
    asleep = threading.Event()

    def act(peers: Peers) -> list[bool]:
        own = peers.steps
        if peers.place.rank == 0:
            before = own.due
            asleep.set()
            select.select([peers.wakeup], [], [], 20)
            seen = [before, own.due]
        else:
            assert asleep.wait(20)
            seen = []
        own.agree(decoding(1))
        return [*seen, own.due]

    assert on_each_rank(Layout(dp=2), act) == [[False, True, False], [False]]


def test_the_proposal_that_a_rank_awaits_wakes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # So that a sleeping rank does not wake by itself to look.
    monkeypatch.setattr("engine.parallel.lockstep.LOOK_SECONDS", 60.0)

    def act(peers: Peers) -> list[float]:
        seconds = []
        for late in (1, 2, 2, 1):
            if peers.place.rank == late:
                time.sleep(ASLEEP)
            started = time.monotonic()
            peers.steps.agree(decoding(1))
            seconds.append(time.monotonic() - started)
        return seconds

    first, _, _ = on_each_rank(Layout(dp=3), act)
    assert max(first) < 20


def test_a_busy_rank_is_not_woken_after_a_rest() -> None:
    rests = [threading.Event(), threading.Event()]

    def act(peers: Peers) -> list[bool]:
        own, rank, woken = peers.steps, peers.place.rank, []

        def agree_late(*late: int) -> None:
            for each in late:
                if rank == each:
                    time.sleep(ASLEEP)
                own.agree(decoding(1))
                woken.append(bool(select.select([peers.wakeup], [], [], 0)[0]))

        # Each rank sleeps and is then late, in both places of its word.
        agree_late(0, 0, 1, 1, 0, 0)
        for event in rests:
            if rank == 0:
                assert not own.due
                event.set()
                select.select([peers.wakeup], [], [], 20)
            else:
                assert event.wait(20)
            for _ in range(3):
                own.agree(decoding(1))
            # By now the other rank has read that this one is awake.
            peers.wakeup.clear()
        agree_late(0, 0)
        return woken

    assert on_each_rank(Layout(dp=2), act) == [[False] * 8] * 2


def test_an_error_names_the_rank_that_does_not_answer() -> None:
    done = threading.Event()

    def act(peers: Peers) -> None:
        if peers.place.rank == 1:
            done.wait(20)
            return
        try:
            with pytest.raises(RankLost, match=r"rank 1 of 2 has not answered for 0.2 s"):
                peers.steps.agree(decoding(1))
        finally:
            done.set()

    on_each_rank(Layout(dp=2), act, limit_seconds=0.2)


def test_the_last_proposal_of_a_lost_rank_counts() -> None:
    def act(peers: Peers) -> StepShape:
        if peers.place.rank == 0:
            time.sleep(ASLEEP)
        shape = peers.steps.agree(decoding(peers.place.rank))
        if peers.place.rank == 0:
            with pytest.raises(RankLost, match="rank 1 of 2 has ended"):
                peers.steps.agree(decoding(1))
        return shape

    assert on_each_rank(Layout(dp=2), act) == [decoding(1)] * 2
