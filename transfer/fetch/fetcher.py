"""A worker's fetches from stores: it sends a lookup, then receives an answer and the blocks."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from mesh.observe.tracing import TraceContext
from transfer.block_macs import Author
from transfer.config import TransferConfig
from transfer.events import Fetched
from transfer.fetch.lookup import MAX_ANSWER_BYTES, Answer, Lookup, Receipt, fetch_key, session_message
from transfer.fetch.mapped_slab import MappedSlab
from transfer.fetch.rates import FetchRates
from transfer.fetch.replay import REPLAYED_MESSAGE
from transfer.incoming import Incoming
from transfer.landing import CANCELLED, DEADLINE_EXCEEDED, SENDER_LOST, WRONG_SIZE, Phase
from transfer.mailbox import Mailbox
from transfer.memory import KvMemory
from transfer.receiver import Receiver
from transfer.seal import WRONG_MAC, Kind, unseal
from transfer.segments import Parts, plan_parts
from transfer.tags import LOOKUP_TAG, RECEIPT_TAG, draw_tags, landing_tag_after, landing_tags
from transfer.tally import Tally
from transfer.ticket import StoreSession
from transfer.transport import Arrival, Transport

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Session:
    """A session with a store, and the number of the last message sent in it."""

    store: StoreSession
    # The store's memory, if this process could map it.
    slab: MappedSlab | None = None
    sequence: int = 0

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence


@dataclass(eq=False)
class _Fetch:
    fetch_id: int
    session: _Session
    # The number of its lookup.
    sequence: int
    answer_tag: int
    hashes: Sequence[bytes]
    blocks: Sequence[int]
    began: float
    deadline: float
    # Set once the store has answered: when it did, how many leading blocks it had in memory, and (below) the landing.
    answered: float | None = None
    in_memory: int = 0
    # How many leading blocks come with their draft layers.
    drafted: int = 0
    incoming: Incoming | None = None
    # Whether all blocks were copied from the store's memory, and the store has not confirmed yet that they were leased.
    unconfirmed: bool = False

    @property
    def matched(self) -> int:
        """How many blocks the store promised."""
        return 0 if self.incoming is None else len(self.incoming.blocks)


class Fetcher:
    """Each fetch ends with one `Fetched`, at its deadline at the latest."""

    def __init__(
        self,
        transport: Transport,
        mailbox: Mailbox,
        receiver: Receiver,
        memory: KvMemory,
        config: TransferConfig,
        clock: Callable[[], float],
        refused: Tally,
        emit: Callable[[Fetched], None],
        author: Author | None,
        draft_layers: int,
        segment_bytes: int,
    ) -> None:
        """With an `author`, only blocks signed by a worker of the namespace are accepted. draft_layers: how many of the
        memory's layers, the last ones, belong to drafts. segment_bytes: the largest segment to ask for.
        """
        self._author = author
        self._parts = Parts(memory.layers - draft_layers, draft_layers)
        self._transport = transport
        self._mailbox = mailbox
        self._receiver = receiver
        self._memory = memory
        self._segment_bytes = segment_bytes
        self._slot_bytes = config.slot_bytes
        self._maps_stores = config.map_stores
        self._seconds = config.fetch_seconds
        self._clock = clock
        self._refused = refused
        self._emit = emit
        self._sessions: dict[str, _Session] = {}
        # Keyed by the tag of the answer.
        self._open: dict[int, _Fetch] = {}
        self.fetches = 0
        self.fetched_blocks = 0
        self.rates = FetchRates()

    @property
    def open(self) -> int:
        return len(self._open)

    @property
    def in_flight(self) -> bool:
        return bool(self._open)

    def deadlines(self) -> list[float]:
        return [fetch.deadline for fetch in self._open.values()]

    def attach(self, store: StoreSession) -> None:
        """Use a session. If it only renews the known one, its fetches and its count of messages continue."""
        known = self._sessions.get(store.store_id)
        if known is not None and known.store == store:
            return
        self.detach(store.store_id)
        self._sessions[store.store_id] = _Session(store, self._map(store))

    def detach(self, store_id: str) -> None:
        session = self._sessions.pop(store_id, None)
        for fetch in [fetch for fetch in self._open.values() if fetch.session is session]:
            self._give_up(fetch, CANCELLED, "the store was detached")

    def fetch(
        self,
        fetch_id: int,
        store_id: str,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        span: TraceContext | None = None,
    ) -> None:
        """See `TransferAgent.fetch`."""
        self.fetches += 1
        session = self._sessions.get(store_id)
        if session is None or not blocks:
            error = None if session else f"no session with the store {store_id}"
            self._emit(Fetched(fetch_id, 0, 0, 0.0, error))
            return
        now = self._clock()
        fetch = _Fetch(
            fetch_id=fetch_id,
            session=session,
            sequence=session.next_sequence(),
            answer_tag=draw_tags(1 + landing_tags(self._memory.layers * len(blocks))),
            hashes=hashes,
            blocks=blocks,
            began=now,
            deadline=now + self._seconds,
        )
        self._open[fetch.answer_tag] = fetch
        self._ask(fetch, b"".join(hashes), span)

    def accept(self, arrival: Arrival) -> bool:
        """Receive an answer. False if its tag belongs to no open fetch."""
        fetch = self._open.get(arrival.tag)
        if fetch is None:
            return False
        self._mailbox.receive(arrival, MAX_ANSWER_BYTES, partial(self._answered, fetch))
        return True

    def poll(self, now: float) -> None:
        """End the fetches that are late, and those whose store is gone."""
        for fetch in list(self._open.values()):
            if fetch.deadline <= now:
                self._give_up(fetch, DEADLINE_EXCEEDED, "the store did not answer in time")
            elif not self._transport.is_reachable(fetch.session.store.worker_address):
                self._give_up(fetch, SENDER_LOST, "the store is gone")

    def _ask(self, fetch: _Fetch, hashes: bytes, span: TraceContext | None) -> None:
        lookup = Lookup(
            sequence=fetch.sequence,
            deadline_ms=int(self._seconds * 1000),
            worker_address=self._transport.address,
            answer_tag=fetch.answer_tag,
            segment_bytes=self._largest_segment(fetch),
            layers=self._memory.layers,
            piece_bytes=self._memory.piece_bytes,
            hashes=hashes,
            traceparent="" if span is None else span.traceparent,
            with_macs=self._author is not None,
            draft_layers=self._parts.draft_layers,
            mapped=fetch.session.slab is not None,
        )
        store = fetch.session.store
        self._tell(store, LOOKUP_TAG, Kind.LOOKUP, lookup)

    def _largest_segment(self, fetch: _Fetch) -> int:
        if fetch.session.slab is None:
            return self._segment_bytes
        # What is copied to its blocks at once takes no slot, and passes through no cache but once.
        return self._slot_bytes

    def _tell(self, store: StoreSession, tag: int, kind: Kind, message: Lookup | Receipt) -> None:
        self._mailbox.send(
            store.worker_address, tag, session_message(kind, store.session_id, store.session_key, message)
        )

    def _map(self, store: StoreSession) -> MappedSlab | None:
        if store.slab is None or not self._maps_stores:
            return None
        try:
            return MappedSlab(store.slab, self._memory)
        except OSError as error:
            fields = {"store": store.store_id, "why": str(error)}
            _log.info("the store's memory cannot be mapped: UCX brings its blocks", extra={"fields": fields})
            return None

    def _answered(self, fetch: _Fetch, sealed: bytes) -> None:
        if self._open.get(fetch.answer_tag) is not fetch:
            # The fetch ended meanwhile.
            return
        answer = unseal(Kind.ANSWER, fetch.session.store.session_key, sealed, Answer)
        if answer is None:
            self._refused.add(WRONG_MAC)
        elif answer.lookup == fetch.sequence and fetch.unconfirmed and answer.confirmed:
            self._end(fetch, fetch.matched, None)
        elif answer.lookup == fetch.sequence and fetch.incoming is not None and answer.matched < fetch.matched:
            self._receiver.give_up(fetch.incoming, SENDER_LOST, "the store could not read all that it found")
        elif answer.lookup != fetch.sequence or fetch.incoming is not None:
            self._refused.add(REPLAYED_MESSAGE)
        else:
            self._begin_landing(fetch, answer)

    def _begin_landing(self, fetch: _Fetch, answer: Answer) -> None:
        fetch.answered = self._clock()
        if answer.matched == 0:
            self._end(fetch, 0, None)
        elif (
            not 0 < answer.matched <= len(fetch.blocks)
            or not self._memory.piece_bytes <= answer.segment_bytes <= self._largest_segment(fetch)
            or not 0 <= (answer.drafted or 0) <= answer.matched
            or (answer.mapped and fetch.session.slab is None)
        ):
            self._refused.add(WRONG_SIZE)
            self._end(fetch, 0, "the store's answer does not fit what was asked")
        else:
            fetch.in_memory = answer.matched if answer.in_memory is None else answer.in_memory
            fetch.drafted = answer.matched if answer.drafted is None else answer.drafted
            fetch.incoming = self._incoming(fetch, answer)
            self._receiver.open(fetch.incoming)

    def _incoming(self, fetch: _Fetch, answer: Answer) -> Incoming:
        piece_bytes = self._memory.piece_bytes
        tiles = plan_parts(self._parts, answer.matched, fetch.drafted, piece_bytes, answer.segment_bytes)
        return Incoming(
            sizes=[tile.pieces * piece_bytes for tile in tiles],
            deadline=fetch.deadline,
            tiles=tiles,
            tag=landing_tag_after(fetch.answer_tag),
            secret=fetch_key(fetch.session.store.session_key, fetch.sequence),
            blocks=fetch.blocks[: answer.matched],
            on_end=partial(self._landed, fetch),
            mac_sink=None if self._author is None else self._author.checks(fetch.hashes),
            source=fetch.session.slab if answer.mapped else None,
            from_store=True,
        )

    def _landed(self, fetch: _Fetch, incoming: Incoming) -> None:
        trusted = incoming.is_sent or incoming.mac_sink is not None
        if incoming.failure is None and not trusted:
            fetch.unconfirmed = True
            self._send_receipt(fetch)
            return
        lacking = [tile.first_block for i, tile in enumerate(incoming.tiles) if incoming.phase(i) is not Phase.LANDED]
        blocks = min(lacking, default=len(incoming.blocks)) if trusted else 0
        self._end(fetch, blocks, incoming.failure.message if incoming.failure else None)

    def _give_up(self, fetch: _Fetch, reason: str, message: str) -> None:
        if fetch.incoming is not None and not fetch.unconfirmed:
            self._receiver.give_up(fetch.incoming, reason, message)
        else:
            self._end(fetch, 0, message)

    def _send_receipt(self, fetch: _Fetch) -> None:
        receipt = Receipt(fetch.sequence, fetch.unconfirmed)
        self._tell(fetch.session.store, RECEIPT_TAG, Kind.RECEIPT, receipt)

    def _end(self, fetch: _Fetch, blocks: int, error: str | None) -> None:
        """blocks: how many leading ones are in place."""
        del self._open[fetch.answer_tag]
        if fetch.incoming is not None and not fetch.incoming.is_sent and not fetch.unconfirmed:
            self._send_receipt(fetch)
        pieces = blocks * self._parts.base_layers + min(fetch.drafted, blocks) * self._parts.draft_layers
        size_bytes = pieces * self._memory.piece_bytes
        now = self._clock()
        seconds = now - fetch.began
        if blocks or now >= fetch.deadline:
            block_bytes = self._parts.base_layers * self._memory.piece_bytes
            self.rates.observe(fetch.matched, fetch.in_memory, max(size_bytes, block_bytes), seconds)
        self.fetched_blocks += blocks
        answered = None if fetch.answered is None else fetch.answered - fetch.began
        self._emit(Fetched(fetch.fetch_id, blocks, size_bytes, seconds, error, min(fetch.drafted, blocks), answered))
