"""The receiver over a transport that does its worst: blocks only ever get what was announced."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fake_transport import FakeTransport
from tests.support.slow_memory import Copying, SlowMemory
from transfer.checksum import segment_checksum
from transfer.host_memory import HostMemory
from transfer.incoming import Incoming
from transfer.landing import Phase
from transfer.mailbox import Mailbox
from transfer.origin import LocalTcp, Origin
from transfer.receiver import Receiver
from transfer.seal import Kind, seal
from transfer.segments import plan_whole
from transfer.slots import SlotPool
from transfer.tags import segment_tag
from transfer.tally import Tally
from transfer.ticket import Announcement
from transfer.transport import Arrival

LAYERS, BLOCKS, PIECE = 2, 9, 50
SLOT = 2 * LAYERS * PIECE
SLOTS = 3
DEADLINE = 10.0
SECRET = b"secret"
TAG = 1000
STALE = 7


class Scene:
    """One landing of all blocks, whose sender's bytes are known."""

    def __init__(self, memory: type[HostMemory | SlowMemory] = HostMemory) -> None:
        self.transport = FakeTransport()
        self.array = np.full((LAYERS, BLOCKS, PIECE), STALE, np.uint8)
        self.right = np.random.default_rng(0).integers(100, 200, self.array.shape, np.uint8)
        self.slots = SlotPool([np.zeros(SLOT, np.uint8) for _ in range(SLOTS)])
        self.refused = Tally()
        self.received = Tally()
        self.local_tcp = LocalTcp(Origin("host", "here"))
        self.memory = memory(self.array)
        self.mailbox = Mailbox(self.transport, self.refused)
        self.receiver = Receiver(
            self.transport,
            self.mailbox,
            self.memory,
            self.slots,
            self.refused,
            self.received,
            self.local_tcp,
        )
        self.tiles = plan_whole(LAYERS, BLOCKS, PIECE, SLOT)
        self.endings: list[Incoming] = []
        self.incoming = Incoming(
            sizes=[tile.pieces * PIECE for tile in self.tiles],
            deadline=DEADLINE,
            tiles=self.tiles,
            tag=TAG,
            secret=SECRET,
            blocks=range(BLOCKS),
            on_end=self.end,
        )
        self.receiver.open(self.incoming)

    def end(self, incoming: Incoming) -> None:
        self.endings.append(incoming)
        assert not [copy for copy in self.copies() if not copy.completed]

    def copies(self) -> list[Copying]:
        return self.memory.copies if isinstance(self.memory, SlowMemory) else []

    def bytes_of(self, index: int) -> np.ndarray:
        tile = self.tiles[index]
        return self.right[:, tile.first_block : tile.first_block + tile.block_count].reshape(-1).copy()

    def arrive(self, index: int, damage: str = "none") -> None:
        data = self.bytes_of(index)
        if damage == "corrupted":
            data[3] ^= 1
        elif damage == "truncated":
            data = data[:-1]
        self._take(Arrival(segment_tag(TAG, index), len(data), data.tobytes()))

    def announce(self, index: int, damage: str = "none") -> None:
        data = self.bytes_of(index)
        checksum = segment_checksum(data, len(data), SECRET if damage != "corrupted" else b"another")
        size = len(data) - (damage == "truncated")
        self.hear(Announcement(index, size, checksum, "fake"), b"forged" if damage == "forged" else SECRET)

    def hear(self, checksum: Announcement, secret: bytes = SECRET) -> None:
        sealed = seal(Kind.ANNOUNCEMENT, secret, checksum)
        self._take(Arrival(TAG, len(sealed), sealed))
        self.transport.finish_messages(TAG)
        self.mailbox.poll()

    def _take(self, arrival: Arrival) -> None:
        if not self.receiver.accept(arrival):
            self.transport.discard(arrival)

    def settle(self, now: float = 0.0) -> None:
        """Let UCX and the memory finish all, until nothing is left to do."""
        while self.receiver.poll(now) or not self.is_settled():
            for copy in self.copies():
                copy.result()
            for receive in self.transport.receives:
                if not receive.completed:
                    receive.write()
                    receive.finish()

    def is_settled(self) -> bool:
        completed = [each.completed for each in self.transport.receives] + [each.completed for each in self.copies()]
        return all(completed)

    def only_right_bytes(self) -> bool:
        """Each segment's blocks are as the sender has them, or as they were: unless it landed, or is being copied."""
        for index, tile in enumerate(self.tiles):
            window = np.s_[:, tile.first_block : tile.first_block + tile.block_count]
            right = (self.array[window] == self.right[window]).all()
            stale = (self.array[window] == STALE).all()
            landed = self.incoming.phase(index) is Phase.LANDED
            if not (right if landed else stale or (right and self.copies())):
                return False
        return True


segments = st.integers(0, 4)
damages = st.sampled_from(["none"] * 6 + ["corrupted", "truncated", "forged"])
actions = st.one_of(
    st.tuples(st.just("arrive"), segments, damages),
    st.tuples(st.just("announce"), segments, damages),
    st.tuples(st.just("turn"), st.sampled_from([0.0] * 9 + [DEADLINE]), st.none()),
    st.tuples(st.just("write"), st.integers(0, 20), st.none()),
    st.tuples(st.just("copy"), st.integers(0, 20), st.none()),
    st.tuples(st.just("finish"), st.integers(0, 20), st.sampled_from([None] * 6 + ["reset"])),
    st.tuples(st.just("cancel"), st.sampled_from([False] * 7 + [True]), st.none()),
)


def act(scene: Scene, action: str, value: Any, extra: Any) -> None:
    pending = [receive for receive in scene.transport.receives if not receive.completed]
    if action == "arrive":
        scene.arrive(value, extra)
    elif action == "announce":
        scene.announce(value, extra)
    elif action == "turn":
        scene.receiver.poll(value)
    elif action == "write" and pending:
        pending[value % len(pending)].write()
    elif action == "copy" and scene.copies():
        scene.copies()[value % len(scene.copies())].result()
    elif action == "finish" and pending:
        receive = pending[value % len(pending)]
        receive.write()
        receive.finish(extra)
    elif action == "cancel" and value:
        scene.receiver.give_up(scene.incoming, "CANCELLED", "")


@settings(max_examples=400)
@given(st.sampled_from([HostMemory, SlowMemory]), st.lists(actions, max_size=80))
def test_in_any_order_landings_verify_bytes_return_slots_and_end(
    memory: type[HostMemory | SlowMemory], steps: list[tuple[str, Any, Any]]
) -> None:
    scene = Scene(memory)
    for step in steps:
        act(scene, *step)
        assert scene.only_right_bytes()
        assert len(scene.endings) <= 1
        landing = scene.incoming
        assert scene.endings == ([landing] if landing.ended else [])
    scene.settle(DEADLINE)
    assert len(scene.endings) == 1
    assert scene.only_right_bytes()
    assert (scene.slots.free, scene.slots.quarantined) == (SLOTS, 0)


def test_all_segments_land_when_nothing_goes_wrong() -> None:
    scene = Scene()
    for index in reversed(range(len(scene.tiles))):
        scene.arrive(index)
        scene.announce(index)
    scene.settle()
    assert scene.endings == [scene.incoming] and scene.incoming.failure is None
    assert (scene.array == scene.right).all()
    assert scene.received.counts == {"fake": scene.array.nbytes}
    assert not scene.refused.counts


def test_more_segments_than_slots_wait_with_their_sender() -> None:
    scene = Scene()
    for index in range(len(scene.tiles)):
        scene.arrive(index)
    scene.receiver.poll(0.0)
    assert len(scene.transport.receives) == SLOTS - 1 < len(scene.tiles)
    for index in range(len(scene.tiles)):
        scene.announce(index)
    scene.settle()
    assert scene.endings == [scene.incoming] and (scene.array == scene.right).all()


def test_a_cancelled_landing_quarantines_the_slot_being_written() -> None:
    scene = Scene()
    scene.arrive(0)
    scene.receiver.poll(0.0)
    scene.receiver.give_up(scene.incoming, "CANCELLED", "")
    assert scene.endings and scene.slots.quarantined == 1
    (receive,) = scene.transport.receives
    receive.write()
    receive.finish()
    scene.receiver.poll(0.0)
    assert (scene.slots.free, scene.slots.quarantined) == (SLOTS, 0)
    assert scene.only_right_bytes()


def test_a_landing_cancelled_during_a_copy_ends_after_it() -> None:
    scene = Scene(SlowMemory)
    scene.arrive(0)
    scene.receiver.poll(0.0)
    (receive,) = scene.transport.receives
    scene.announce(0)
    receive.write()
    receive.finish()
    scene.receiver.poll(0.0)
    (copy,) = scene.copies()
    assert scene.receiver.in_flight and not copy.completed
    scene.receiver.give_up(scene.incoming, "CANCELLED", "")
    assert scene.endings and copy.completed
    assert scene.slots.free == SLOTS


def test_a_late_segment_belongs_to_no_landing() -> None:
    scene = Scene()
    scene.receiver.give_up(scene.incoming, "CANCELLED", "")
    assert not scene.receiver.accept(Arrival(TAG, SLOT, b""))
    assert not scene.receiver.accept(Arrival(segment_tag(TAG, 0), SLOT, b""))


@pytest.mark.parametrize(
    ("what", "damage", "reason"),
    [
        ("arrive", "truncated", "wrong_size"),
        ("announce", "truncated", "wrong_size"),
        ("arrive", "corrupted", "wrong_checksum"),
        ("announce", "corrupted", "wrong_checksum"),
    ],
)
def test_a_segment_unlike_its_announcement_ends_the_landing(what: str, damage: str, reason: str) -> None:
    scene = Scene()
    scene.arrive(0, damage if what == "arrive" else "none")
    scene.announce(0, damage if what == "announce" else "none")
    scene.settle()
    (landing,) = scene.endings
    assert landing.failure is not None and landing.failure.reason == "NOT_BELIEVED"
    assert scene.refused.counts[reason] == 1
    assert (scene.array == STALE).all()
    assert scene.slots.free == SLOTS


def test_duplicate_segments_and_checksums_are_dropped_and_counted() -> None:
    scene = Scene()
    for _ in range(2):
        scene.arrive(0)
        scene.announce(0)
    scene.settle()
    assert scene.refused.counts == {"duplicate_segment": 1, "duplicate_checksum": 1}
    assert len(scene.transport.discarded) == 1
    assert scene.incoming.failure is None


def test_a_checksum_of_an_unknown_segment_is_counted() -> None:
    scene = Scene()
    scene.hear(Announcement(99, 1, b"", "fake"))
    assert scene.refused.counts == {"unknown_segment": 1}


@pytest.mark.parametrize("checksum", [b"", bytes(7), bytes(16)])
def test_a_checksum_of_the_wrong_length_ends_the_landing(checksum: bytes) -> None:
    scene = Scene()
    scene.arrive(0)
    scene.hear(Announcement(0, len(scene.bytes_of(0)), checksum, "fake"))
    scene.settle()
    assert scene.refused.counts == {"wrong_size": 1} and scene.endings == [scene.incoming]
    assert (scene.array == STALE).all()


def test_a_checksum_sealed_by_another_is_counted_and_ignored() -> None:
    scene = Scene()
    for index in range(len(scene.tiles)):
        scene.announce(index, "forged")
        scene.arrive(index)
        scene.announce(index)
    scene.settle()
    assert scene.refused.counts == {"wrong_mac": len(scene.tiles)}
    assert (scene.array == scene.right).all()


def test_a_landing_without_segments_ends_at_once() -> None:
    scene = Scene()
    ended: list[Incoming] = []
    scene.receiver.open(Incoming([], DEADLINE, [], 1, SECRET, [], ended.append))
    assert len(ended) == 1 and ended[0].failure is None


def test_segments_that_take_tcp_within_a_host_are_counted() -> None:
    scene = Scene()
    scene.arrive(0)
    data = scene.bytes_of(0)
    checksum = segment_checksum(data, len(data), SECRET)
    scene.hear(Announcement(0, len(data), checksum, "tcp", (), Origin("host", "there")))
    assert scene.local_tcp.bytes.counts == {"there": len(data)}
