"""Fetches over real UCX: the store is another process."""

import pytest

from tests.support.transfer_peer import (
    BLOCKS,
    CONFIG,
    LAYERS,
    NAMESPACE,
    PIECE_BYTES,
    KnownChains,
    Peer,
    Setup,
    Side,
    assert_all_free,
    two_sides,
)
from tests.support.waiting import wait_until
from transfer.events import Event, Fetched
from transfer.fetch.lookup import MAX_LOOKUP_BYTES, Answer, Lookup, session_message
from transfer.seal import Kind, seal
from transfer.tags import LOOKUP_TAG
from transfer.ticket import StoreSession
from transfer.ucx import UcxTransport

CHAIN = [bytes([number]) * 16 for number in range(40)]
STORED = 30
SOURCE = list(range(BLOCKS - STORED, BLOCKS))
KEY = bytes(range(32))
SESSION_ID = 7


def stored() -> KnownChains:
    return KnownChains(CHAIN[:STORED], SOURCE)


def attach(here: Side, store: Peer, key: bytes = KEY) -> None:
    store.agent("open_session", SESSION_ID, KEY)
    here.agent("attach_store", StoreSession("store", "epoch", store.address(), SESSION_ID, key, NAMESPACE))


def fetch(here: Side, hashes: list[bytes], fetch_id: int = 1) -> Fetched:
    here.agent("fetch", fetch_id, "store", hashes, list(range(len(hashes))))
    return fetched(here)


def fetch_in_vain(here: Side, hashes: list[bytes]) -> Fetched:
    """Fetch from a store that does not answer; the time of the fetch passes quickly."""
    here.agent("fetch", 1, "store", hashes, list(range(len(hashes))))
    events: list[Event] = []

    def ended() -> bool:
        here.pass_time(1.0)
        events.extend(here.agent("events"))
        return bool(events)

    wait_until(ended)
    (event,) = events
    assert isinstance(event, Fetched)
    return event


def events_of(side: Side, count: int) -> list[Event]:
    """The next `count` events."""
    events: list[Event] = []

    def came() -> bool:
        events.extend(side.agent("events"))
        return len(events) >= count

    wait_until(came)
    return events


def fetched(here: Side) -> Fetched:
    (event,) = events_of(here, 1)
    assert isinstance(event, Fetched)
    return event


def assert_nothing_leased(store: Peer) -> None:
    assert_all_free(store)
    assert store.leased() == 0


@pytest.mark.parametrize("transports", [None, "tcp"])
def test_a_fetch_lands_the_longest_prefix_that_the_store_knows(transports: str | None) -> None:
    config = CONFIG.model_copy(update={"transports": transports})
    with two_sides(Setup(seed=1, config=config), config=config, lookups=stored()) as (here, store):
        attach(here, store)
        untouched = here.blocks(range(STORED, BLOCKS)).copy()
        for number in range(3):
            event = fetch(here, CHAIN, number)
            assert (event.fetch_id, event.blocks, event.error) == (number, STORED, None)
            assert event.answered_seconds is not None and 0 < event.answered_seconds < event.seconds
        assert (here.blocks(range(STORED)) == store.blocks(SOURCE)).all()
        assert (here.blocks(range(STORED, BLOCKS)) == untouched).all()
        counters = assert_all_free(here)
        assert (counters.fetches, counters.fetched_blocks) == (3, 3 * STORED)
        assert counters.fetch_bytes_per_second is not None and counters.fetch_bytes_per_second > 0
        assert not counters.refused
        assert_nothing_leased(store)


def test_fetches_at_once_are_answered_each() -> None:
    with two_sides(lookups=stored()) as (here, store):
        attach(here, store)
        for number in range(6):
            here.agent("fetch", number, "store", CHAIN[:10], list(range(number * 10, number * 10 + 10)))
        events = [event for event in events_of(here, 6) if isinstance(event, Fetched)]
        assert [(event.blocks, event.error) for event in events] == [(10, None)] * 6
        for number in range(6):
            assert (here.blocks(range(number * 10, number * 10 + 10)) == store.blocks(SOURCE[:10])).all()
        assert_nothing_leased(store)


def test_a_chain_that_the_store_does_not_know_brings_nothing() -> None:
    with two_sides(lookups=stored()) as (here, store):
        attach(here, store)
        event = fetch(here, CHAIN[STORED:])
        assert (event.blocks, event.error) == (0, None)
        assert_all_free(here)


def test_a_fetch_without_a_session_answers_at_once() -> None:
    with two_sides(lookups=stored()) as (here, _):
        event = fetch(here, CHAIN)
        assert event.blocks == 0 and event.error is not None


def test_a_renewed_session_continues_and_a_closed_one_is_refused() -> None:
    with two_sides(lookups=stored()) as (here, store):
        attach(here, store)
        assert fetch(here, CHAIN).blocks == STORED
        attach(here, store)
        assert fetch(here, CHAIN).blocks == STORED
        store.agent("close_session", SESSION_ID)
        event = fetch_in_vain(here, CHAIN)
        assert event.blocks == 0 and event.error is not None and event.answered_seconds is None
        wait_until(lambda: store.agent("counters").refused == {"unknown_session": 1})
        assert_all_free(here)


def test_a_lookup_with_a_wrong_mac_is_refused_and_counted() -> None:
    with two_sides(lookups=stored()) as (here, store):
        attach(here, store, key=bytes(32))
        event = fetch_in_vain(here, CHAIN)
        assert event.blocks == 0 and event.error is not None
        wait_until(lambda: store.agent("counters").refused == {"wrong_mac": 1})


def test_a_killed_store_ends_the_fetch() -> None:
    with two_sides(lookups=stored()) as (here, store):
        attach(here, store)
        assert fetch(here, CHAIN).blocks == STORED
        store.kill()
        event = fetch_in_vain(here, CHAIN)
        assert event.blocks == 0 and event.error is not None
        assert_all_free(here)


def test_a_frozen_store_ends_the_fetch_at_its_deadline() -> None:
    with two_sides(lookups=stored()) as (here, store):
        attach(here, store)
        before = here.blocks(range(STORED)).copy()
        store.freeze()
        event = fetch_in_vain(here, CHAIN)
        assert event.blocks == 0 and event.error is not None and event.seconds >= CONFIG.fetch_seconds
        store.thaw()
        wait_until(lambda: store.agent("counters").sent_bytes)
        assert_nothing_leased(store)
        assert_all_free(here)
        assert (here.blocks(range(STORED)) == before).all()


def test_a_corrupted_block_ends_the_fetch_before_it() -> None:
    with two_sides(lookups=stored()) as (here, store):
        attach(here, store)
        before = here.blocks(range(STORED)).copy()
        store.corrupt_gathers()
        event = fetch(here, CHAIN)
        assert event.blocks == 0 and event.error is not None
        assert (here.blocks(range(STORED)) == before).all()
        assert assert_all_free(here).refused["wrong_checksum"] == 1
        store.agent("close_session", SESSION_ID)
        assert_nothing_leased(store)


def test_replayed_malformed_and_misfitting_messages_are_refused_and_counted() -> None:
    with Peer(lookups=stored()) as store:
        store.agent("open_session", SESSION_ID, KEY)
        outsider = UcxTransport(None)
        lookup = Lookup(1, 1000, outsider.address, 99, CONFIG.slot_bytes, 1, 1, b"".join(CHAIN))
        sealed = session_message(Kind.LOOKUP, SESSION_ID, KEY, lookup)
        reserved_tag = Lookup(
            2, 1000, outsider.address, LOOKUP_TAG - 1, CONFIG.slot_bytes, LAYERS, PIECE_BYTES, b"".join(CHAIN)
        )
        as_answer = sealed[:8] + seal(Kind.ANSWER, KEY, Answer(3, 1, 1))
        expected = {
            "wrong_size": 2,
            "replayed_message": 1,
            "wrong_mac": 1,
            "unknown_session": 1,
            "unknown_tag": 1,
            "oversized_message": 1,
        }
        for tag, message in (
            (LOOKUP_TAG, sealed),
            (LOOKUP_TAG, sealed),
            (LOOKUP_TAG, session_message(Kind.LOOKUP, SESSION_ID, KEY, reserved_tag)),
            (LOOKUP_TAG, as_answer),
            (LOOKUP_TAG, b"short"),
            (LOOKUP_TAG, bytes(MAX_LOOKUP_BYTES + 1)),
            (12345, b"anything"),
        ):
            outsider.send(store.address(), tag, message)

        def all_refused() -> bool:
            outsider.progress()
            return bool(store.agent("counters").refused == expected)

        wait_until(all_refused)
        outsider.close()
        assert_nothing_leased(store)


def test_a_session_of_another_geometry_is_refused_and_never_mixed() -> None:
    with two_sides(Setup(seed=1, piece_bytes=12_000), lookups=stored()) as (here, store):
        attach(here, store)
        assert fetch(here, CHAIN).blocks == 0
        assert store.agent("counters").refused == {"wrong_size": 1}
        assert_nothing_leased(store)
