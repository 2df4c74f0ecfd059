"""Pushes over real UCX: the sender, or the receiver, is another process."""

import os
import sys
from functools import partial
from typing import Any

import msgspec
import pytest

from mesh.errors import InvalidRequest, NamespaceMismatch
from tests.support.transfer_peer import BLOCKS, CONFIG, LAYERS, NAMESPACE, Setup, Watch, assert_all_free, two_sides
from tests.support.waiting import wait_until
from transfer.events import Landed, LandingFailed, PushEnded
from transfer.host_memory import HostMemory
from transfer.seal import Kind, seal
from transfer.tags import LOOKUP_TAG
from transfer.ticket import Announcement
from transfer.transport import Transmission
from transfer.ucx import UcxTransport

HERE = list(range(50))
THERE = list(range(BLOCKS - 1, BLOCKS - 51, -1))
WHOLE, LAYERWISE = 100, 1000


@pytest.mark.parametrize(
    ("tokens", "transports"), [(WHOLE, None), (LAYERWISE, None), (LAYERWISE, "tcp"), (LAYERWISE, "posix,self")]
)
def test_a_push_puts_the_senders_blocks_into_the_receivers(tokens: int, transports: str | None) -> None:
    config = CONFIG.model_copy(update={"transports": transports})
    with two_sides(Setup(seed=1, config=config), config=config) as (here, peer):
        watch = Watch(here, peer)
        untouched = here.blocks(range(50, BLOCKS)).copy()
        ticket = here.agent("open_landing", HERE, tokens, 0, 60.0)
        peer.agent("push", ticket, THERE)
        peer.agent("ready", ticket.transfer_id, LAYERS, len(THERE))
        watch.until(Landed, PushEnded)
        assert (here.blocks(HERE) == peer.blocks(THERE)).all()
        assert (here.blocks(range(50, BLOCKS)) == untouched).all()
        received, sent = assert_all_free(here), assert_all_free(peer)
        assert received.received_bytes == sent.sent_bytes
        (name,) = received.received_bytes
        assert transports is None or name == transports.split(",")[0]
        assert sum(received.received_bytes.values()) == ticket.size_bytes
        (ended,) = [event for event in watch.sent if isinstance(event, PushEnded)]
        assert ended.seconds is not None and ended.seconds > 0


def test_memory_whose_transfers_wake_no_thread_is_polled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # This process's memory is taken for a GPU's.
    monkeypatch.setattr(HostMemory, "is_on_gpu", True)
    before = sys.getswitchinterval(), dict(os.environ)
    with two_sides() as (here, peer):
        assert (sys.getswitchinterval(), dict(os.environ)) == before
        watch = Watch(here, peer)
        ticket = here.agent("open_landing", HERE, WHOLE, 0, 60.0)
        peer.agent("push", ticket, THERE)
        peer.agent("ready", ticket.transfer_id, LAYERS, len(THERE))
        watch.until(Landed, PushEnded)
        assert (here.blocks(HERE) == peer.blocks(THERE)).all()
        assert_all_free(here)


def test_layers_leave_before_the_last_is_computed() -> None:
    with two_sides() as (here, peer):
        watch = Watch(here, peer)
        ticket = here.agent("open_landing", HERE, LAYERWISE, 0, 60.0)
        peer.agent("push", ticket, THERE)
        peer.agent("ready", ticket.transfer_id, 1, len(THERE))
        wait_until(lambda: here.agent("counters").received_bytes)
        watch.look()
        assert not watch.sent
        peer.agent("ready", ticket.transfer_id, LAYERS, len(THERE))
        watch.until(Landed, PushEnded)
        assert (here.blocks(HERE) == peer.blocks(THERE)).all()
        (ended,) = [event for event in watch.sent if isinstance(event, PushEnded)]
        assert ended.seconds is None


def test_pushes_at_once_share_slots_and_all_land() -> None:
    with two_sides() as (here, peer):
        watch = Watch(here, peer)
        halves = [(HERE[:25], THERE[:25]), (HERE[25:], THERE[25:])]
        for number, (blocks, source) in enumerate(halves):
            ticket = here.agent("open_landing", blocks, (WHOLE, LAYERWISE)[number], 0, 60.0)
            peer.agent("push", ticket, source)
            peer.agent("ready", ticket.transfer_id, LAYERS, len(source))
        watch.until(Landed, PushEnded)
        while len([event for event in watch.received if isinstance(event, Landed)]) < 2:
            watch.look()
        assert (here.blocks(HERE) == peer.blocks(THERE)).all()
        assert_all_free(here)
        assert_all_free(peer)


def test_a_corrupted_segment_never_reaches_the_blocks() -> None:
    with two_sides() as (here, peer):
        watch = Watch(here, peer)
        before = here.blocks(HERE).copy()
        peer.corrupt_gathers()
        ticket = here.agent("open_landing", HERE, WHOLE, 0, 60.0)
        peer.agent("push", ticket, THERE)
        peer.agent("ready", ticket.transfer_id, LAYERS, len(THERE))
        watch.until(LandingFailed)
        assert (here.blocks(HERE) == before).all()
        assert assert_all_free(here).refused["wrong_checksum"] == 1
        peer.agent("cancel_push", ticket.transfer_id)
        assert_all_free(peer)


def test_a_forged_checksum_is_refused_and_the_landing_goes_on() -> None:
    with two_sides() as (here, peer):
        watch = Watch(here, peer)
        ticket = here.agent("open_landing", HERE, WHOLE, 0, 60.0)
        forger = UcxTransport(None)
        forged = Announcement(0, ticket.segments[0].size_bytes, bytes(16), "tcp")
        for message in (seal(Kind.ANNOUNCEMENT, bytes(32), forged), b"short", bytes(100_000)):
            sending = forger.send(here.address(), ticket.tag, message)
            wait_until(partial(_has_completed, forger, sending))
        wait_until(lambda: here.agent("counters").refused == {"wrong_mac": 2, "oversized_message": 1})
        forger.close()
        peer.agent("push", ticket, THERE)
        peer.agent("ready", ticket.transfer_id, LAYERS, len(THERE))
        watch.until(Landed)
        assert (here.blocks(HERE) == peer.blocks(THERE)).all()


def test_segments_of_a_cancelled_landing_are_dropped() -> None:
    with two_sides() as (here, peer):
        watch = Watch(here, peer)
        before = here.blocks(HERE).copy()
        ticket = here.agent("open_landing", HERE, WHOLE, 0, 60.0)
        here.agent("cancel_landing", ticket.transfer_id)
        watch.until(LandingFailed)
        peer.agent("push", ticket, THERE)
        peer.agent("ready", ticket.transfer_id, LAYERS, len(THERE))
        watch.until(PushEnded)
        assert (here.blocks(HERE) == before).all()
        # Bytes and checksums, the last of which may come after their sender knows that they went.
        wait_until(lambda: here.agent("counters").refused.get("unknown_tag") == 2 * len(ticket.segments))
        assert_all_free(here)
        assert_all_free(peer)


def test_tickets_that_do_not_fit_are_refused_and_counted() -> None:
    with two_sides() as (here, peer):
        ticket = here.agent("open_landing", HERE, WHOLE, 0, 60.0)
        replaced = _replace(ticket)
        for wrong, blocks in (
            (ticket, THERE[:-1]),
            (replaced(deadline_ms=0), THERE),
            (replaced(segments=ticket.segments * 100), THERE),
            (replaced(segments=(*ticket.segments[1:], ticket.segments[0])), THERE),
            (replaced(tag=LOOKUP_TAG - len(ticket.segments)), THERE),
        ):
            with pytest.raises(InvalidRequest):
                peer.agent("push", wrong, blocks)
        with pytest.raises(NamespaceMismatch):
            peer.agent("push", replaced(namespace=_replace(NAMESPACE)(dtype="float8_e4m3fn")), THERE)
        peer.agent("push", ticket, THERE)
        with pytest.raises(InvalidRequest, match="used before"):
            peer.agent("push", ticket, THERE)
        assert peer.agent("counters").refused == {
            "wrong_size": 2,
            "reserved_tag": 1,
            "expired_ticket": 1,
            "oversized_segment_list": 1,
            "other_namespace": 1,
            "replayed_ticket": 1,
        }
        peer.agent("cancel_push", ticket.transfer_id)
        assert_all_free(peer)


def _replace(struct: Any) -> Any:
    return lambda **changes: msgspec.structs.replace(struct, **changes)


def _has_completed(transport: UcxTransport, sending: Transmission) -> bool:
    transport.progress()
    return sending.completed
