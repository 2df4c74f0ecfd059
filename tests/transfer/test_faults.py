"""Peers that are killed or frozen: each transfer ends once, and every slot comes back."""

from typing import Any

import pytest

from tests.support.transfer_peer import BLOCKS, CONFIG, LAYERS, Peer, Setup, Side, Watch, assert_all_free, two_sides
from tests.support.waiting import wait_until
from transfer.events import LandingFailed, PushEnded
from transfer.ticket import Ticket

HERE = list(range(BLOCKS))
# Large enough for a peer to be stopped in the middle of a segment.
PIECE_BYTES = 250_000
# They pass when a test says so.
DEADLINE_SECONDS = STUCK_SECONDS = 1000.0
LARGE = CONFIG.model_copy(update={"slot_bytes": 32 << 20})
TRANSPORTS = pytest.mark.parametrize("transports", ["tcp", "posix,self"])


def large(transports: str) -> dict[str, Any]:
    return {"config": LARGE.model_copy(update={"transports": transports}), "piece_bytes": PIECE_BYTES}


def open_push(receiver: Side | Peer, sender: Side | Peer) -> Ticket:
    ticket: Ticket = receiver.agent("open_landing", HERE, 0, 0, DEADLINE_SECONDS)
    sender.agent("push", ticket, HERE)
    return ticket


def holds_slots(side: Side | Peer) -> bool:
    counters = side.agent("counters")
    return bool(counters.free_slots < counters.total_slots)


@TRANSPORTS
def test_a_sender_killed_mid_segment_leaks_no_slot_or_landing(transports: str) -> None:
    with two_sides(Setup(seed=1, **large(transports)), **large(transports)) as (here, peer):
        watch = Watch(here, peer)
        push_until_slots_are_taken(here, peer)
        peer.kill()
        here.pass_time(DEADLINE_SECONDS)
        wait_until(lambda: failed(watch))
        assert_all_free(here)


@TRANSPORTS
def test_a_sender_frozen_past_the_deadline_fails_the_landing(transports: str) -> None:
    with two_sides(Setup(seed=1, **large(transports)), **large(transports)) as (here, peer):
        before = here.blocks(HERE).copy()
        watch = Watch(here, peer)
        push_until_slots_are_taken(here, peer)
        peer.freeze()
        here.pass_time(DEADLINE_SECONDS)
        wait_until(lambda: failed(watch))
        last = watch.received[-1]
        assert isinstance(last, LandingFailed) and last.reason == "DEADLINE_EXCEEDED"
        # No other transfer may have the slots that UCX still writes to.
        quarantined = here.agent("counters").quarantined_slots
        assert quarantined + here.agent("counters").free_slots == CONFIG.slots
        peer.thaw()
        peer.pass_time(DEADLINE_SECONDS)
        watch.until(PushEnded)
        assert_all_free(here)
        assert_all_free(peer)
        assert (here.blocks(HERE) == before).all()


def test_a_receiver_killed_ends_the_push() -> None:
    with two_sides(Setup(seed=1, **large("tcp")), **large("tcp")) as (here, peer):
        watch = Watch(peer, here)
        push_to_a_frozen_receiver(peer, here)
        peer.kill()
        wait_until(lambda: ended(watch))
        assert "lost" in error_of(watch)
        assert_all_free(here)


@TRANSPORTS
def test_a_cancelled_push_returns_its_slots_despite_a_killed_receiver(transports: str) -> None:
    with two_sides(Setup(seed=1, **large(transports)), **large(transports)) as (here, peer):
        watch = Watch(peer, here)
        ticket = push_to_a_frozen_receiver(peer, here)
        peer.kill()
        here.agent("cancel_push", ticket.transfer_id)
        wait_until(lambda: ended(watch))
        assert_all_free(here)


@TRANSPORTS
def test_a_receiver_frozen_past_the_deadline_holds_few_slots_briefly(
    transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.sender._STUCK_SECONDS", STUCK_SECONDS)
    with two_sides(Setup(seed=1, **large(transports)), **large(transports)) as (here, peer):
        watch = Watch(peer, here)
        push_to_a_frozen_receiver(peer, here)
        here.pass_time(DEADLINE_SECONDS)
        wait_until(lambda: ended(watch))
        assert "deadline" in error_of(watch)
        counters = here.agent("counters")
        assert counters.open_pushes == 0 and counters.quarantined_slots == CONFIG.slots // 2
        here.pass_time(STUCK_SECONDS)
        # It is disconnected in the end, though UCX never reports that it is frozen.
        assert_all_free(here)


def test_a_push_to_a_dead_peer_ends_at_once() -> None:
    with two_sides() as (here, peer):
        watch = Watch(peer, here)
        ticket = open_push(peer, here)
        peer.kill()
        here.agent("ready", ticket.transfer_id, LAYERS, BLOCKS)
        wait_until(lambda: ended(watch))
        assert_all_free(here)


def push_until_slots_are_taken(receiver: Side, sender: Peer) -> None:
    """The receiver is being sent to, and knows no checksum: nothing of it can land."""
    sender.lose_checksums()
    ticket = open_push(receiver, sender)
    sender.agent("ready", ticket.transfer_id, LAYERS, BLOCKS)
    wait_until(lambda: holds_slots(receiver))


def push_to_a_frozen_receiver(receiver: Peer, sender: Side) -> Ticket:
    """Segments are on their way there."""
    ticket = open_push(receiver, sender)
    receiver.freeze()
    sender.agent("ready", ticket.transfer_id, LAYERS, BLOCKS)
    wait_until(lambda: holds_slots(sender))
    return ticket


def failed(watch: Watch) -> bool:
    watch.received += watch.receiver.agent("events")
    return any(isinstance(event, LandingFailed) for event in watch.received)


def error_of(watch: Watch) -> str:
    """What the push ended with."""
    last = watch.sent[-1]
    assert isinstance(last, PushEnded) and last.error is not None
    return last.error


def ended(watch: Watch) -> bool:
    watch.sent += watch.sender.agent("events")
    return any(isinstance(event, PushEnded) for event in watch.sent)
