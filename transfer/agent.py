"""Moves the KV of one process: owns its open transfers, and the thread that carries them out."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from mesh.domain.kv_identity import KvNamespace
from mesh.domain.workers import TransferCounters
from mesh.errors import InvalidRequest
from mesh.observe.tracing import TraceContext
from mesh.start_times import StartTimes
from transfer.block_macs import Author, Authorship
from transfer.config import TransferConfig
from transfer.events import Event
from transfer.exchange import Exchange
from transfer.fetch.lookup_server import LookupHandler
from transfer.kept_macs import KeptMacs
from transfer.memory import KvMemory
from transfer.segments import HOST_SEGMENT_BYTES, Tile, plan_layerwise, plan_whole
from transfer.tally import Tally
from transfer.thread import TransferThread
from transfer.ticket import StoreSession, Ticket
from transfer.tickets import REPLAYED_TICKET, Geometry, make_ticket, refusal_of
from transfer.ucx import UcxTransport
from transfer.ucx_settings import check_carries_gpu_memory

# Used tickets that are remembered, to refuse them a second time. Older ones have expired at their receiver.
_REMEMBERED_TICKETS = 16_384


class TransferAgent:
    """All methods are thread-safe and return at once. A peer's mistake never raises: it is reported as an event.

    One thread owns the UCX worker, the landings, pushes and slots, and copies all bytes. The methods post commands to
    it.
    """

    def __init__(
        self,
        memory: KvMemory,
        namespace: KvNamespace,
        config: TransferConfig,
        clock: Callable[[], float],
        wake: Callable[[], None],
        lookups: LookupHandler | None = None,
        rank: int = 0,
        authorship: Authorship | None = None,
        times: StartTimes | None = None,
    ) -> None:
        """`lookups` makes this agent a store. `rank` is a rank's number in its worker. The transfer thread calls `wake`
        when `events` has something new. With `authorship`, a worker signs the blocks that it pushes to stores, and
        accepts from them only signed blocks. `times` records the duration of each phase.

        Raises ConfigError if UCX is missing or does not start, if its transports cannot reach the memory, or if a slot
        cannot hold one block of one layer.
        """
        self._rank = rank
        self._geometry = Geometry(memory.layers, memory.piece_bytes, config.slot_bytes)
        # The largest segment that suits this process.
        self.segment_bytes = config.slot_bytes
        if lookups is None and not memory.is_on_gpu:
            self.segment_bytes = min(config.slot_bytes, max(HOST_SEGMENT_BYTES, memory.piece_bytes))
        self._plan(1, plan_whole, None, memory.layers)
        self._namespace = namespace
        self._layerwise_tokens = config.layerwise_tokens
        self._wake = wake
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._unannounced = False
        self._used_tickets: OrderedDict[bytes, None] = OrderedDict()
        # Refusals both of `push` in its caller's thread and of the transfer thread.
        self._refused = Tally()
        if memory.is_on_gpu:
            check_carries_gpu_memory(config.transports)
        self._transport = UcxTransport(config.transports, config.devices, times)
        author = None if authorship is None else Author(authorship, namespace)
        self._exchange = Exchange(
            self._transport,
            memory,
            config,
            clock,
            self._emit,
            self._refused,
            lookups,
            author,
            namespace.draft_layers,
            times,
            self.segment_bytes,
        )
        self._thread = TransferThread(self._transport, self._exchange, clock, self._announce)

    @property
    def address(self) -> bytes:
        """UCX worker address."""
        return self._transport.address

    @property
    def passes(self) -> int:
        """Beginnings and ends of the transfer thread's passes: odd during a pass, even between passes."""
        return self._thread.passes

    def events(self) -> list[Event]:
        """The events since the last call, in order. If an error ended the transfer thread, raises that error."""
        if self._thread.failure is not None:
            raise self._thread.failure
        with self._lock:
            events, self._events = self._events, []
        return events

    # Receiving:

    def open_landing(
        self,
        blocks: Sequence[int],
        tokens: int,
        attempt: int,
        deadline_seconds: float,
        sender_slot_bytes: int | None = None,
        with_drafts: bool = True,
    ) -> Ticket:
        """Open a landing for these blocks (in chain order), with all layers, or with the base layers alone.

        The whole prompt's `tokens` decide between whole and layerwise segments. A segment fits a slot on both sides; if
        `sender_slot_bytes` is None, the sender takes as large ones as we do. Exactly one Landed or LandingFailed ends
        the landing.
        """
        plan = plan_layerwise if tokens >= self._layerwise_tokens else plan_whole
        namespace = self._namespace if with_drafts else self._namespace.base
        tiles = self._plan(len(blocks), plan, sender_slot_bytes, namespace.layers)
        ticket = make_ticket(
            tiles, self._geometry.piece_bytes, namespace, self._rank, self.address, attempt, deadline_seconds
        )
        self._thread.post(partial(self._exchange.open_landing, ticket, blocks))
        return ticket

    def cancel_landing(self, transfer_id: bytes) -> None:
        """Give up the landing. LandingFailed follows once nothing can write to its blocks."""
        self._thread.post(partial(self._exchange.cancel_landing, transfer_id))

    # Sending:

    def push(self, ticket: Ticket, blocks: Sequence[int], offered: Sequence[bytes] | None = None) -> None:
        """Send these blocks (the landing's, in chain order) as segments become `ready`.

        `offered`: the blocks' hashes, if they go to a store.

        Exactly one PushEnded ends the push. Raises InvalidRequest for a ticket that does not fit the blocks or was used
        before, NamespaceMismatch for one of another namespace.
        """
        refusal = refusal_of(ticket, len(blocks), self._namespace, self._geometry)
        if refusal is not None:
            self._refused.add(refusal.reason)
            raise refusal.error
        self._use_up(ticket)
        self._thread.post(partial(self._exchange.push, ticket, blocks, offered))

    def ready(self, transfer_id: bytes, layers: int, blocks: int) -> None:
        """The first `layers` layers of the push's first `blocks` blocks are now computed."""
        self._thread.post(partial(self._exchange.ready, transfer_id, layers, blocks))

    def cancel_push(self, transfer_id: bytes) -> None:
        """Give up the push. PushEnded follows once nothing reads its blocks."""
        self._thread.post(partial(self._exchange.cancel_push, transfer_id))

    # Stores, from both sides:

    @property
    def macs(self) -> KeptMacs:
        """On a store: the MACs of its blocks."""
        assert self._exchange.macs is not None, "not a store"
        return self._exchange.macs

    def attach_store(self, session: StoreSession) -> None:
        """Use this session from now on, in place of an earlier one with the same store. No other agent may use it."""
        self._thread.post(partial(self._exchange.fetcher.attach, session))

    def detach_store(self, store_id: str) -> None:
        """Forget the session. Its open fetches end with what has landed."""
        self._thread.post(partial(self._exchange.fetcher.detach, store_id))

    def fetch(
        self,
        fetch_id: int,
        store_id: str,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        span: TraceContext | None = None,
    ) -> None:
        """Look up these hashes of a chain, and land the matching blocks in `blocks` (one for each hash).

        Fetched follows within the configured deadline. `span` is the caller's span, for the store's traces.
        """
        assert len(hashes) == len(blocks)
        self._thread.post(partial(self._exchange.fetcher.fetch, fetch_id, store_id, hashes, blocks, span))

    def open_session(self, session_id: int, session_key: bytes) -> None:
        """On a store: answer this session's lookups."""
        assert self._exchange.server is not None, "not a store"
        self._thread.post(partial(self._exchange.server.open_session, session_id, session_key))

    def close_session(self, session_id: int) -> None:
        """On a store: refuse the session's lookups from now on, and end the answers in progress."""
        assert self._exchange.server is not None, "not a store"
        self._thread.post(partial(self._exchange.server.close_session, session_id))

    def blocks_read(self, session_id: int, sequence: int, ready: int, over: bool) -> None:
        """On a store: the first `ready` blocks of an answer now have their bytes. `over`: the others will not come."""
        assert self._exchange.server is not None, "not a store"
        self._thread.post(partial(self._exchange.server.blocks_read, session_id, sequence, ready, over))

    def counters(self) -> TransferCounters:
        """Totals since the start, and what is open now; for status, metrics and leak tests."""
        return self._exchange.counters()

    def close(self) -> None:
        """Stop the thread. Open transfers end without an event."""
        self._thread.close()

    def _plan(
        self, blocks: int, plan: Callable[[int, int, int, int], list[Tile]], sender_slot_bytes: int | None, layers: int
    ) -> list[Tile]:
        ours = self.segment_bytes
        segment_bytes = ours if sender_slot_bytes is None else min(ours, sender_slot_bytes)
        return plan(layers, blocks, self._geometry.piece_bytes, segment_bytes)

    def _use_up(self, ticket: Ticket) -> None:
        with self._lock:
            replayed = ticket.transfer_id in self._used_tickets
            self._used_tickets[ticket.transfer_id] = None
            if len(self._used_tickets) > _REMEMBERED_TICKETS:
                self._used_tickets.popitem(last=False)
        if replayed:
            self._refused.add(REPLAYED_TICKET)
            raise InvalidRequest("the ticket was used before: open a landing for each push", field="ticket")

    def _emit(self, event: Event) -> None:
        with self._lock:
            # Announce only the first event: the owner reads all events once it is woken.
            self._unannounced |= not self._events
            self._events.append(event)

    def _announce(self) -> None:
        if self._unannounced:
            self._unannounced = False
            self._wake()
