"""Peers that are killed or frozen: each transfer ends once, and every slot comes back."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.transfer_peer import BLOCKS, CONFIG, LAYERS, Peer, Relay, Setup, Side, assert_all_free, two_sides
from transfer.events import Event, Granted, LandingFailed, PushEnded

HERE = list(range(BLOCKS))
# Large enough for a peer to be stopped in the middle of a segment.
PIECE_BYTES = 250_000
LARGE = CONFIG.model_copy(update={"slot_bytes": 32 << 20})
TRANSPORTS = pytest.mark.parametrize("transports", ["tcp", "posix,self"])


def large(transports: str) -> dict[str, Any]:
    return {"config": LARGE.model_copy(update={"transports": transports}), "piece_bytes": PIECE_BYTES}


def begin_push(receiver: Side | Peer, sender: Side | Peer, deadline_seconds: float) -> Relay:
    relay = Relay(receiver, sender)
    ticket = receiver.agent("open_landing", HERE, 0, 0, deadline_seconds)
    sender.agent("push", ticket, HERE)
    sender.agent("ready", ticket.transfer_id, LAYERS, BLOCKS)
    relay.transfer_id = ticket.transfer_id
    return relay


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        # The transfer thread of this process needs the interpreter too.
        time.sleep(0.0005)


def holds_slots(side: Side | Peer) -> bool:
    counters = side.agent("counters")
    return counters.free_slots < counters.total_slots


@TRANSPORTS
def test_a_sender_killed_in_the_middle_of_a_segment_leaves_no_slot_and_no_landing_behind(transports: str) -> None:
    with two_sides(Setup(seed=1, **large(transports)), **large(transports)) as (here, peer):
        relay = begin_push(here, peer, deadline_seconds=4.0)
        grant_until_slots_are_taken(relay)
        peer.kill()
        wait_for(lambda: failed(relay))
        assert_all_free(here)


@TRANSPORTS
def test_a_sender_frozen_past_the_deadline_fails_the_landing_and_its_late_bytes_reach_nothing(transports: str) -> None:
    with two_sides(Setup(seed=1, **large(transports)), **large(transports)) as (here, peer):
        before = here.blocks(HERE).copy()
        relay = begin_push(here, peer, deadline_seconds=4.0)
        grant_until_slots_are_taken(relay)
        peer.freeze()
        wait_for(lambda: failed(relay))
        assert relay.received[-1].reason == "DEADLINE_EXCEEDED"
        # Nobody else may have the slots that UCX still writes to.
        quarantined = here.agent("counters").quarantined_slots
        assert quarantined + here.agent("counters").free_slots == CONFIG.slots
        peer.thaw()
        relay.until(PushEnded)
        assert_all_free(here)
        assert_all_free(peer)
        assert (here.blocks(HERE) == before).all()


def test_a_receiver_killed_ends_the_push() -> None:
    with two_sides(Setup(seed=1, **large("tcp")), **large("tcp")) as (here, peer):
        relay = begin_push(peer, here, deadline_seconds=30.0)
        push_to_a_frozen_receiver(relay)
        peer.kill()
        wait_for(lambda: ended(relay))
        assert "lost" in str(relay.sent[-1].error)
        assert_all_free(here)


@TRANSPORTS
def test_a_push_that_is_cancelled_gives_its_slots_back_though_the_receiver_was_killed(transports: str) -> None:
    with two_sides(Setup(seed=1, **large(transports)), **large(transports)) as (here, peer):
        relay = begin_push(peer, here, deadline_seconds=30.0)
        push_to_a_frozen_receiver(relay)
        peer.kill()
        here.agent("cancel_push", relay.transfer_id)
        wait_for(lambda: ended(relay))
        assert_all_free(here)


@TRANSPORTS
def test_a_receiver_frozen_past_the_deadline_holds_only_its_share_of_slots_for_a_while(transports: str) -> None:
    with two_sides(Setup(seed=1, **large(transports)), **large(transports)) as (here, peer):
        relay = begin_push(peer, here, deadline_seconds=0.5)
        push_to_a_frozen_receiver(relay)
        wait_for(lambda: ended(relay))
        assert "deadline" in str(relay.sent[-1].error)
        counters = here.agent("counters")
        assert counters.open_pushes == 0 and counters.quarantined_slots == CONFIG.slots // 2
        # It is hung up on in the end, though nothing ever tells that it is frozen.
        assert_all_free(here)


def test_a_peer_that_is_gone_ends_a_push_that_begins_only_now() -> None:
    with two_sides() as (here, peer):
        relay = begin_push(peer, here, deadline_seconds=30.0)
        grants = peer.agent("events")
        peer.kill()
        for grant in grants:
            here.agent("granted", grant.transfer_id, grant.segment)
        wait_for(lambda: ended(relay))
        assert_all_free(here)


def grant_until_slots_are_taken(relay: Relay) -> None:
    """The receiver is being sent to; no digest has reached it."""
    relay.digests = lambda digest: []
    wait_for(lambda: relay.step() or holds_slots(relay.receiver))


def push_to_a_frozen_receiver(relay: Relay) -> None:
    """Its grants are out, it stops, and segments are on their way."""
    grants: list[Event] = []
    wait_for(lambda: bool(grants.extend(relay.receiver.agent("events")) or grants))
    relay.receiver.freeze()
    for grant in grants:
        assert isinstance(grant, Granted)
        relay.sender.agent("granted", grant.transfer_id, grant.segment)
    wait_for(lambda: holds_slots(relay.sender))


def failed(relay: Relay) -> bool:
    relay.received += relay.receiver.agent("events")
    return any(isinstance(event, LandingFailed) for event in relay.received)


def ended(relay: Relay) -> bool:
    relay.sent += relay.sender.agent("events")
    return any(isinstance(event, PushEnded) for event in relay.sent)
