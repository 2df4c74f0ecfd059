"""Ranks that agree on steps over host memory."""

import select
import threading

import pytest

from engine.batch import StepShape
from engine.parallel.layout import Layout
from engine.parallel.lockstep import Lockstep
from engine.parallel.peers import Peers
from mesh.errors import RankLost
from tests.support.rank_threads import on_each_rank


def lockstep(peers: Peers) -> Lockstep:
    return Lockstep(peers.steps, peers.wake)


def test_ranks_agree_on_a_shape_that_holds_all_proposals() -> None:
    proposals = [StepShape(5, drafts=1), StepShape(300, decode_only=False), StepShape(0, stopping=True)]
    agreed = on_each_rank(Layout(dp=3, ep=1), lambda peers: lockstep(peers).agree(proposals[peers.place.rank]))
    assert agreed == [StepShape(300, decode_only=False, drafts=1)] * 3


def test_ranks_stop_when_all_want_to() -> None:
    agreed = on_each_rank(Layout(dp=2), lambda peers: lockstep(peers).agree(StepShape(0, stopping=True)))
    assert [shape.stopping for shape in agreed] == [True, True]


def test_many_agreements_follow_one_another_in_order() -> None:
    def act(peers: Peers) -> list[int]:
        own = lockstep(peers)
        return [own.agree(StepShape(step * 10 + peers.place.rank)).tokens for step in range(200)]

    assert on_each_rank(Layout(dp=2), act) == [[step * 10 + 1 for step in range(200)]] * 2


def test_a_proposal_wakes_the_others_and_is_due_until_they_answer() -> None:
    asleep = threading.Event()

    def act(peers: Peers) -> list[bool]:
        own = lockstep(peers)
        if peers.place.rank == 0:
            before = own.due
            asleep.set()
            select.select([peers.wakeup], [], [], 20)
            seen = [before, own.due]
        else:
            assert asleep.wait(20)
            seen = []
        own.agree(StepShape(1))
        return [*seen, own.due]

    assert on_each_rank(Layout(dp=2), act) == [[False, True, False], [False]]


def test_a_rank_that_does_not_answer_ends_the_wait_with_its_name() -> None:
    done = threading.Event()

    def act(peers: Peers) -> None:
        if peers.place.rank == 1:
            done.wait(20)
            return
        try:
            with pytest.raises(RankLost, match=r"rank 1 of 2 has not answered for 0.2 s"):
                lockstep(peers).agree(StepShape(1))
        finally:
            done.set()

    on_each_rank(Layout(dp=2), act, limit_seconds=0.2)
