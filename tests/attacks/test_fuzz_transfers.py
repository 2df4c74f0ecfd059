"""What peers send over UCX, and tickets: sealed with the right key or not, nothing of it ends the transfer thread."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from deepmesh.internal.v1 import landing_pb2
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.kv_identity import KvNamespace
from mesh.errors import MeshError
from tests.support.fake_transport import FakeTransport
from tests.support.transfer_peer import KnownChains
from transfer import wire
from transfer.block_macs import Author, Authorship
from transfer.config import TransferConfig
from transfer.exchange import Exchange
from transfer.fetch.lookup import Answer, Lookup, fetch_key, session_message
from transfer.host_memory import HostMemory
from transfer.seal import Kind, seal
from transfer.tags import LOOKUP_TAG
from transfer.tally import Tally
from transfer.ticket import Announcement, BlockMac, Segment, StoreSession, Ticket
from transfer.tickets import Geometry, refusal_of
from transfer.transport import Arrival

LAYERS, DRAFT_LAYERS, BLOCKS, PIECE = 2, 1, 4, 64
NAMESPACE = KvNamespace("weights", "float32", LAYERS, "mla:8+4", draft_layers=DRAFT_LAYERS)
CONFIG = TransferConfig(slot_bytes=1 << 16, slots=2)
CHAIN = [bytes([number]) * 16 for number in range(BLOCKS)]
KEY, SESSION = bytes(range(32)), 7

numbers = st.integers(-3, 70) | st.sampled_from([PIECE, LAYERS * PIECE, 2**16, 2**31, 2**63 - 1, -(2**63)])
positive = st.integers(0, 70) | st.sampled_from([2**31, 2**63 - 1])
hashes = st.lists(st.sampled_from(CHAIN), max_size=6).map(b"".join) | st.binary(max_size=40)
lookups = st.builds(
    Lookup,
    sequence=numbers,
    deadline_ms=numbers,
    worker_address=st.binary(max_size=20),
    answer_tag=numbers,
    segment_bytes=numbers,
    layers=st.just(LAYERS) | numbers,
    piece_bytes=st.just(PIECE) | numbers,
    hashes=hashes,
    traceparent=st.text(max_size=60),
    draft_layers=st.just(DRAFT_LAYERS) | numbers,
    mapped=st.booleans(),
)
macs = st.none() | st.builds(
    BlockMac, st.text(max_size=5), st.binary(max_size=20), st.binary(max_size=40), st.binary(max_size=10)
)
announcements = st.builds(
    Announcement,
    segment=numbers,
    size_bytes=st.just(LAYERS * BLOCKS * PIECE) | numbers,
    checksum=st.binary(max_size=20),
    transport=st.text(max_size=5),
    macs=st.lists(macs, max_size=5).map(tuple),
)
answers = st.builds(
    Answer,
    lookup=st.integers(0, 3),
    matched=numbers,
    segment_bytes=numbers,
    in_memory=numbers,
    drafted=numbers,
    mapped=st.booleans(),
    confirmed=st.booleans(),
)
segments = st.builds(
    Segment,
    index=positive,
    destination_rank=positive,
    worker_address=st.binary(max_size=20),
    first_layer=st.just(0) | numbers,
    layer_count=st.just(LAYERS) | numbers,
    first_block=st.just(0) | numbers,
    block_count=st.just(BLOCKS) | numbers,
    size_bytes=st.just(LAYERS * BLOCKS * PIECE) | numbers,
)
tickets = st.builds(
    Ticket,
    transfer_id=st.binary(max_size=20),
    attempt=positive,
    secret=st.binary(max_size=40),
    tag=st.just(5) | numbers,
    deadline_ms=st.just(1000) | numbers,
    namespace=st.just(NAMESPACE) | st.just(msgspec.structs.replace(NAMESPACE, layers=9)),
    segments=st.lists(segments, max_size=3).map(tuple),
)


class Scene:
    """A store, or a worker, whose peer says anything."""

    def __init__(self, store: bool = False) -> None:
        self.transport = FakeTransport()
        self.memory = HostMemory(np.zeros((LAYERS, BLOCKS, PIECE), np.uint8))
        self.events: list[Any] = []
        lookups = KnownChains(CHAIN, range(BLOCKS)) if store else None
        author = None if store else Author(Authorship(b"of all workers", "w"), NAMESPACE)
        self.exchange = Exchange(
            self.transport,
            self.memory,
            CONFIG,
            lambda: 0.0,
            self.events.append,
            Tally(),
            lookups,
            author,
            DRAFT_LAYERS,
        )

    def take(self, tag: int, message: bytes) -> None:
        """It comes, and all that follows from it happens."""
        self.transport.arrivals.append(Arrival(tag, len(message), message))
        self.settle()

    def settle(self) -> None:
        for _ in range(20):
            self.exchange.poll()
            for each in [*self.transport.receives, *self.transport.sends]:
                if not each.completed:
                    if each.payload:
                        each.write()
                    each.finish()


@given(st.lists(lookups, min_size=1, max_size=3), st.booleans())
def test_a_store_survives_whatever_a_worker_looks_up(asked: Sequence[Lookup], sealed: bool) -> None:
    scene = Scene(store=True)
    assert scene.exchange.server is not None
    scene.exchange.server.open_session(SESSION, KEY)
    for lookup in asked:
        scene.take(LOOKUP_TAG, session_message(Kind.LOOKUP, SESSION, KEY if sealed else bytes(32), lookup))
    # That one is for lookups, and no worker's.
    assert all(send.tag < LOOKUP_TAG for send in scene.transport.sends)
    scene.exchange.server.close_session(SESSION)
    scene.settle()
    counters = scene.exchange.counters()
    assert (counters.open_pushes, counters.free_slots) == (0, counters.total_slots)


@given(st.lists(answers, max_size=3), st.lists(announcements, max_size=3), st.binary(max_size=40))
def test_a_worker_survives_whatever_a_store_answers(
    answered: Sequence[Answer], announced: Sequence[Announcement], content: bytes
) -> None:
    scene = Scene()
    fetcher = scene.exchange.fetcher
    fetcher.attach(StoreSession("s", "e", b"store", SESSION, KEY, NAMESPACE))
    fetcher.fetch(1, "s", CHAIN, range(BLOCKS))
    (tag,) = fetcher._open
    for answer in answered:
        scene.take(tag, seal(Kind.ANSWER, KEY, answer))
    for announcement in announced:
        scene.take(tag + 1, seal(Kind.ANNOUNCEMENT, fetch_key(KEY, 1), announcement))
        scene.take(tag + 2, content)
    fetcher.detach("s")
    scene.settle()
    assert [event.fetch_id for event in scene.events] == [1]
    assert scene.events[0].blocks == 0 and not any(rows.any() for rows in scene.memory._rows)
    counters = scene.exchange.counters()
    assert counters.free_slots == counters.total_slots


@given(tickets)
def test_a_ticket_is_refused_or_pushed_into_and_nothing_else(ticket: Ticket) -> None:
    scene, geometry = Scene(), Geometry(LAYERS, PIECE, CONFIG.slot_bytes)
    refusal = refusal_of(ticket, BLOCKS, NAMESPACE, geometry)
    if refusal is not None:
        assert isinstance(refusal.error, MeshError)
        return
    scene.exchange.push(ticket, range(BLOCKS), CHAIN)
    scene.exchange.ready(ticket.transfer_id, LAYERS, BLOCKS)
    scene.settle()
    assert [event.transfer_id for event in scene.events] == [ticket.transfer_id]


@given(st.binary(max_size=200))
def test_bytes_that_are_no_ticket_are_refused_as_such(content: bytes) -> None:

    message = landing_pb2.LandingTicket()
    try:
        message.ParseFromString(content)
    except DecodeError:
        return
    try:
        wire.ticket(message)
    except MeshError:
        return
