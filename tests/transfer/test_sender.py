"""The sender over a transport that completes when the test says so."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fake_transport import FakeTransmission, FakeTransport
from tests.support.slow_memory import Copying, SlowMemory
from transfer.checksum import segment_checksum
from transfer.host_memory import HostMemory
from transfer.mailbox import Mailbox
from transfer.origin import Origin
from transfer.outgoing import Outgoing
from transfer.push import PushState
from transfer.seal import Kind, unseal
from transfer.segments import Tile, plan_layerwise
from transfer.sender import Sender
from transfer.slots import SlotPool
from transfer.tags import segment_of
from transfer.tally import Tally
from transfer.ticket import Announcement

LAYERS, BLOCKS, PIECE = 4, 6, 50
SLOT = 3 * PIECE
SLOTS = 4
DEADLINE = 10.0
SECRET = b"secret"
ORIGIN = Origin("host", "here")
TAG = 1000


class Scene:
    """A push of all blocks, layer by layer."""

    def __init__(self, address: bytes = b"there", memory: type[HostMemory | SlowMemory] = HostMemory) -> None:
        self.transport = FakeTransport()
        self.array = np.random.default_rng(0).integers(0, 256, (LAYERS, BLOCKS, PIECE), np.uint8)
        self.slots = SlotPool([np.zeros(SLOT, np.uint8) for _ in range(SLOTS)])
        self.sent_bytes = Tally()
        self.memory = memory(self.array)
        mailbox = Mailbox(self.transport, Tally())
        self.sender = Sender(self.transport, mailbox, self.memory, self.slots, self.sent_bytes, ORIGIN)
        self.tiles = plan_layerwise(LAYERS, BLOCKS, PIECE, SLOT)
        self.endings: list[Outgoing] = []
        self.outgoing = self.open(address)

    def open(self, address: bytes) -> Outgoing:
        outgoing = Outgoing(
            push=PushState(self.tiles, DEADLINE),
            tiles=self.tiles,
            addresses=[address] * len(self.tiles),
            tag=TAG,
            secret=SECRET,
            blocks=range(BLOCKS),
            ended=self.end,
        )
        self.sender.open(outgoing)
        return outgoing

    def end(self, outgoing: Outgoing) -> None:
        self.endings.append(outgoing)
        assert not [copy for copy in self.copies() if not copy.completed]

    def copies(self) -> list[Copying]:
        return self.memory.copies if isinstance(self.memory, SlowMemory) else []

    @property
    def segments(self) -> list[FakeTransmission]:
        """Sent, in order."""
        return [send for send in self.transport.sends if send.tag != TAG]

    @property
    def announced(self) -> list[Announcement | None]:
        sealed = [send.buffer for send in self.transport.sends if send.tag == TAG]
        return [unseal(Kind.ANNOUNCEMENT, SECRET, each, Announcement) for each in sealed]

    def is_settled(self) -> bool:
        completed = [each.completed for each in self.transport.sends] + [each.completed for each in self.copies()]
        return all(completed)

    def settle(self, now: float = 0.0) -> None:
        """Let the memory and UCX finish all, until nothing is left to do."""
        while self.sender.poll(now) or not self.is_settled():
            for copy in self.copies():
                copy.result()
            for send in self.transport.sends:
                if not send.completed:
                    send.finish()


actions = st.one_of(
    st.tuples(st.just("computed"), st.tuples(st.integers(0, LAYERS), st.integers(0, BLOCKS))),
    st.tuples(st.just("turn"), st.sampled_from([0.0] * 9 + [DEADLINE])),
    st.tuples(st.just("copy"), st.integers(0, 20)),
    st.tuples(st.just("finish"), st.tuples(st.integers(0, 20), st.sampled_from([None] * 6 + ["reset"]))),
    st.tuples(st.just("cancel"), st.sampled_from([False] * 7 + [True])),
)


@settings(max_examples=300)
@given(st.sampled_from([HostMemory, SlowMemory]), st.lists(actions, max_size=80))
def test_in_any_order_computed_segments_go_once_and_slots_return(
    memory: type[HostMemory | SlowMemory], steps: list[tuple[str, Any]]
) -> None:
    scene = Scene(memory=memory)
    push = scene.outgoing.push
    computed: set[tuple[int, int]] = set()
    for action, value in steps:
        pending = [send for send in scene.transport.sends if not send.completed]
        if action == "computed":
            push.computed(*value)
            computed |= {(layer, block) for layer in range(value[0]) for block in range(value[1])}
        elif action == "turn":
            scene.sender.poll(value)
        elif action == "copy" and scene.copies():
            scene.copies()[value % len(scene.copies())].result()
        elif action == "finish" and pending:
            pending[value[0] % len(pending)].finish(value[1])
        elif action == "cancel" and value:
            scene.sender.give_up(scene.outgoing, "cancelled")
        went = [segment_of(send.tag, TAG) for send in scene.segments]
        assert len(went) == len(set(went))
        for index in went:
            assert index is not None
            tile = scene.tiles[index]
            layers = range(tile.first_layer, tile.first_layer + tile.layer_count)
            blocks = range(tile.first_block, tile.first_block + tile.block_count)
            assert {(layer, block) for layer in layers for block in blocks} <= computed
        assert len(scene.endings) <= 1
    scene.settle()
    scene.settle(DEADLINE)
    assert scene.endings == [scene.outgoing]
    assert (scene.slots.free, scene.slots.quarantined) == (SLOTS, 0)


def test_each_segment_is_announced_with_its_slots_checksum() -> None:
    scene = Scene()
    scene.outgoing.push.computed(LAYERS, BLOCKS)
    scene.sender.poll(0.0)
    (send,) = scene.segments
    checksum = segment_checksum(send.buffer, len(send.buffer), SECRET)
    assert scene.announced == [Announcement(0, len(send.buffer), checksum, "fake", (), ORIGIN)]
    scene.settle()
    assert scene.sent_bytes.counts == {"fake": scene.array.nbytes} and scene.outgoing.push.error is None


def test_a_gathered_segment_is_sent_while_the_next_is_gathered() -> None:
    scene = Scene(memory=SlowMemory)
    scene.outgoing.push.computed(LAYERS, BLOCKS)
    for _ in range(2):
        scene.sender.poll(0.0)
    (first,) = scene.copies()
    assert scene.sender.in_flight and not scene.transport.sends
    first.result()
    scene.sender.poll(0.0)
    (send,) = scene.segments
    (checksum,) = scene.announced
    assert checksum is not None and checksum.checksum == segment_checksum(send.buffer, len(send.buffer), SECRET)
    _, second = scene.copies()
    assert not second.completed


def test_the_first_checksum_to_a_peer_waits_for_its_transport() -> None:
    scene = Scene()
    scene.transport.name = None
    scene.outgoing.push.computed(LAYERS, BLOCKS)
    scene.sender.poll(0.0)
    (send,) = scene.segments
    assert not scene.announced
    scene.transport.name = "fake"
    send.finish()
    # Without a checksum the push would never end.
    assert scene.sender.poll(0.0)
    assert [(checksum.segment, checksum.transport) for checksum in scene.announced if checksum][:1] == [(0, "fake")]


def test_a_push_ends_once_its_last_checksum_is_sent() -> None:
    scene = Scene()
    scene.outgoing.push.computed(LAYERS, BLOCKS)
    for _ in scene.tiles:
        scene.sender.poll(0.0)
        for send in scene.segments:
            send.finish()
        if len(scene.segments) < len(scene.tiles):
            scene.transport.finish_messages(TAG)
    scene.sender.poll(0.0)
    assert not scene.endings
    scene.transport.finish_messages(TAG)
    scene.sender.poll(0.0)
    assert scene.endings and scene.slots.free == SLOTS


def test_a_push_cancelled_during_a_gather_ends_after_it() -> None:
    scene = Scene(memory=SlowMemory)
    scene.outgoing.push.computed(LAYERS, BLOCKS)
    scene.sender.poll(0.0)
    scene.sender.give_up(scene.outgoing, "cancelled")
    assert scene.endings and scene.copies()[0].completed
    assert not scene.transport.sends and scene.slots.free == SLOTS


def test_a_computed_segment_goes_before_an_earlier_uncomputed_one() -> None:
    scene = Scene()
    scene.outgoing.push.computed(1, BLOCKS)
    for _ in range(3):
        scene.sender.poll(0.0)
    first_layer_of_later_blocks = scene.tiles.index(Tile(0, 1, 3, 3))
    assert [segment_of(send.tag, TAG) for send in scene.segments] == [0, first_layer_of_later_blocks]


def test_one_peer_holds_at_most_half_of_the_slots() -> None:
    scene = Scene()
    other = scene.open(b"elsewhere")
    for outgoing in (scene.outgoing, other):
        outgoing.push.computed(LAYERS, BLOCKS)
    for _ in range(10):
        scene.sender.poll(0.0)
    assert [send.address for send in scene.segments] == [b"there", b"elsewhere", b"there"]


def test_a_peer_with_only_quarantined_sends_is_disconnected_for_slots() -> None:
    scene = Scene(address=b"frozen")
    more = [scene.open(b"frozen too")]
    for outgoing in [scene.outgoing, *more]:
        outgoing.push.computed(LAYERS, BLOCKS)
    for _ in range(10):
        scene.sender.poll(0.0)
    scene.sender.poll(DEADLINE)
    assert scene.slots.quarantined == SLOTS - 1 and not scene.transport.disconnected
    alive = scene.open(b"alive")
    alive.push.deadline = 2 * DEADLINE
    alive.push.computed(LAYERS, BLOCKS)
    scene.sender.poll(DEADLINE)
    assert set(scene.transport.disconnected) == {b"frozen", b"frozen too"}
    scene.settle(DEADLINE)
    assert alive.push.error is None and scene.slots.free == SLOTS


def test_a_peer_that_ignores_a_cancelled_push_is_disconnected() -> None:
    scene = Scene(address=b"frozen")
    scene.outgoing.push.computed(LAYERS, BLOCKS)
    scene.sender.poll(0.0)
    scene.sender.give_up(scene.outgoing, "cancelled")
    scene.sender.poll(1.0)
    assert scene.slots.quarantined == 1 and not scene.transport.disconnected
    (later,) = scene.sender.deadlines()
    scene.sender.poll(later)
    assert scene.transport.disconnected == [b"frozen"]
    scene.sender.poll(later)
    assert scene.slots.free == SLOTS
