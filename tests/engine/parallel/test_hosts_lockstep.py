"""Ranks that agree on steps over two hosts, each with memory of its own and a line between them."""

import select
import threading

import pytest

from engine.parallel.hosts_lockstep import agreement_of
from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from engine.step.shape import StepShape
from tests.support.rank_threads import on_each_rank
from tests.support.shapes import decoding

LAYOUTS = [Layout(dp=2, ep=2, hosts=2), Layout(tp=2, dp=2, ep=4, hosts=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_hosts_agree_on_a_shape_that_holds_all_proposals(layout: Layout) -> None:
    def act(peers: Peers) -> list[StepShape]:
        own, rank = agreement_of(peers), peers.in_worker.rank
        return [own.agree(decoding(step * 10 + rank, waiting_prompts=1)) for step in range(100)]

    last = layout.world - 1
    expected = [decoding(step * 10 + last, waiting_prompts=layout.world) for step in range(100)]
    assert on_each_rank(layout, act) == [expected] * layout.world


@pytest.mark.parametrize("decode_only", [True, False])
def test_ranks_that_guess_unequally_deep_agree_on_one_shape(decode_only: bool) -> None:
    shapes = [StepShape(6, rows=6), StepShape(8, rows=2, drafts=3), StepShape(4, rows=4)]
    shapes.append(StepShape(3, rows=1, drafts=2) if decode_only else StepShape(7, decode_only=False))
    first, *others = on_each_rank(
        Layout(dp=4, ep=4, hosts=2), lambda peers: agreement_of(peers).agree(shapes[peers.in_worker.rank])
    )
    assert others == [first] * 3
    assert (first.decode_only, first.drafts) == (decode_only, 3) and first.tokens >= 8


def test_ranks_stop_when_all_hosts_want_to() -> None:
    def act(peers: Peers) -> list[bool]:
        own, rank = agreement_of(peers), peers.in_worker.rank
        return [own.agree(decoding(1, stopping=step >= rank)).stopping for step in range(5)]

    assert on_each_rank(Layout(dp=4, ep=4, hosts=2), act) == [[False, False, False, True, True]] * 4


def test_a_proposal_wakes_every_rank_of_the_other_host() -> None:
    asleep = threading.Barrier(4)

    def act(peers: Peers) -> list[bool]:
        own = agreement_of(peers)
        before = own.due
        asleep.wait(20)
        if peers.in_worker.rank:
            # The proposal wakes the first host's other rank and the second host's first rank, which wakes the last one.
            while not own.due:
                select.select([peers.wakeup], [], [], 20)
                peers.wakeup.clear()
        own.agree(decoding(1))
        asleep.wait(20)
        after = own.due
        # No rank leaves before.
        asleep.wait(20)
        return [before, after]

    assert on_each_rank(Layout(dp=4, ep=4, hosts=2), act) == [[False, False]] * 4
