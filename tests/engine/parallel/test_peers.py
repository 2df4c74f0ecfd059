"""Ranks of a host that form one group after another over the same memory."""

import socket
import threading

import pytest

from engine.parallel.host_line import END
from engine.parallel.layout import Group, Layout, Place
from engine.parallel.peers import GroupDescriptors, Peers, prepare_memory
from mesh.errors import RankLost
from tests.support.shapes import decoding
from tests.support.waiting import wait_until

LAYOUT = Layout(dp=2, ep=2)


def test_a_rank_that_gives_up_spoils_its_hosts_steps() -> None:
    descriptors = GroupDescriptors.create(2)
    first, second = (Peers(Place(LAYOUT, rank), descriptors, 20.0) for rank in range(2))
    assert not first.broken and not first.given_up
    second.give_up()
    assert first.broken and first.given_up and second.given_up
    for peers in (first, second):
        assert peers.leave(0)
    prepare_memory(descriptors.memory, 2)
    again = Peers(Place(LAYOUT, 0), descriptors, 20.0)
    assert not again.broken and not again.given_up
    again.close()
    descriptors.close()


def test_all_ranks_of_a_host_hear_of_a_lost_one() -> None:
    service, line = socket.socketpair()
    descriptors = GroupDescriptors.create(2, line.detach())
    first, second = (Peers(Place(Layout(dp=4, ep=4, hosts=2), rank), descriptors, 20.0) for rank in range(2))
    meeting, lost = first.tensors(Group.WORLD), list[str]()

    def meet() -> None:
        meeting.arrive()
        with pytest.raises(RankLost) as raised:
            meeting.wait()
        lost.append(raised.value.message)

    # The second has no line. It waits for a rank of the other host meanwhile.
    waiting = threading.Thread(target=meet)
    waiting.start()
    assert not second.broken
    with service:
        service.sendall(END)
        wait_until(lambda: second.broken)
        assert second.leave(0)
        waiting.join()
        assert lost == ["rank 1 of 2 has ended"] and first.leave(20)
    descriptors.close()


def test_ranks_agree_again_after_they_have_left_a_group() -> None:
    descriptors = GroupDescriptors.create(2)
    first, second = (Peers(Place(LAYOUT, rank), descriptors, 20.0) for rank in range(2))
    assert second.leave(0) and first.broken
    # It has proposed, in vain.
    with pytest.raises(RankLost, match="rank 1 of 2 has ended"):
        first.steps.agree(decoding(7))
    assert first.leave(0)
    prepare_memory(descriptors.memory, 2)
    first, second = (Peers(Place(LAYOUT, rank), descriptors, 20.0) for rank in range(2))
    assert not first.broken and not second.steps.due
    agreed = []
    other = threading.Thread(target=lambda: agreed.append(second.steps.agree(decoding(3))))
    other.start()
    assert first.steps.agree(decoding(2)) == decoding(3)
    other.join()
    assert agreed == [decoding(3)]
    for peers in (first, second):
        peers.close()
    descriptors.close()
