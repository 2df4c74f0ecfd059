"""What a store tells workers that map its memory, and how long it keeps the blocks for them."""

import numpy as np

from tests.support.fake_transport import FakeTransport
from transfer.fetch.referrals import Referrals
from transfer.host_memory import HostMemory
from transfer.mailbox import Mailbox
from transfer.outgoing import Outgoing
from transfer.push import PushState
from transfer.seal import Kind, unseal
from transfer.segments import plan_whole
from transfer.tally import Tally
from transfer.ticket import Announcement

LAYERS, BLOCKS, PIECE, TAG, DEADLINE = 2, 6, 40, 1000, 10.0
SECRET = b"secret"
# Two blocks of the store's in each segment.
TILES = plan_whole(LAYERS, BLOCKS, PIECE, 2 * LAYERS * PIECE)
PLACES = [5, 0, 3, 1, 4, 2]


class Scene:
    def __init__(self) -> None:
        self.transport, self.sent_bytes = FakeTransport(), Tally()
        self.memory = HostMemory(np.random.default_rng(0).integers(0, 256, (LAYERS, BLOCKS, PIECE), np.uint8))
        mailbox = Mailbox(self.transport, Tally())
        self.referrals = Referrals(self.memory, self.transport, mailbox, self.sent_bytes)
        self.endings: list[Outgoing] = []
        push = PushState(TILES, DEADLINE)
        self.outgoing = Outgoing(push, TILES, [b"there"] * len(TILES), TAG, SECRET, PLACES, self.endings.append)
        self.referrals.open(self.outgoing)

    def announced(self, ready: int) -> list[Announcement]:
        """What is told once the first `ready` blocks have their bytes."""
        self.outgoing.push.computed(LAYERS, ready)
        while self.referrals.poll(0.0):
            pass
        sealed = [bytes(each.buffer) for each in self.transport.sends]
        announcements = [unseal(Kind.ANNOUNCEMENT, SECRET, each, Announcement) for each in sealed]
        return [each for each in announcements if each is not None]


def test_a_segment_is_announced_with_its_places_once_ready() -> None:
    scene = Scene()
    assert [each.sources for each in scene.announced(3)] == [(5, 0)]
    told = scene.announced(BLOCKS)
    assert [(each.segment, each.sources) for each in told] == [(0, (5, 0)), (1, (3, 1)), (2, (4, 2))]
    assert not any(each.checksum for each in told)
    assert {(each.address, each.tag) for each in scene.transport.sends} == {(b"there", TAG)}


def test_blocks_are_kept_until_the_worker_has_copied_them() -> None:
    scene = Scene()
    scene.announced(BLOCKS)
    assert not scene.endings and scene.referrals.deadlines() == [DEADLINE]
    scene.referrals.copied(scene.outgoing)
    assert scene.endings == [scene.outgoing] and scene.outgoing.push.error is None
    assert scene.sent_bytes.counts == {"mapped": LAYERS * BLOCKS * PIECE} and scene.referrals.deadlines() == []


def test_a_worker_that_ends_early_gets_no_further_segment() -> None:
    scene = Scene()
    scene.announced(2)
    scene.referrals.copied(scene.outgoing)
    assert scene.endings == [scene.outgoing]
    assert len(scene.announced(BLOCKS)) == 1


def test_blocks_are_free_after_the_deadline_or_their_worker() -> None:
    for late in (True, False):
        scene = Scene()
        scene.announced(BLOCKS)
        scene.transport.reachable = late
        scene.referrals.poll(DEADLINE if late else 0.0)
        assert scene.endings == [scene.outgoing] and scene.outgoing.push.error is not None
        scene.referrals.copied(scene.outgoing)
        assert scene.endings == [scene.outgoing]
