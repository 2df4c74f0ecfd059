"""All transfers of one process, as its transfer thread carries them out."""

from collections.abc import Callable, Sequence
from functools import partial

from mesh.domain.workers import TransferCounters
from mesh.start_times import StartTimes
from transfer.block_macs import Author
from transfer.config import TransferConfig
from transfer.events import Event, Landed, LandingFailed, PushEnded
from transfer.fetch.fetcher import Fetcher
from transfer.fetch.lookup_server import LookupHandler, LookupServer
from transfer.fetch.referrals import Referrals
from transfer.host_memory import HostMemory
from transfer.incoming import Incoming
from transfer.kept_macs import Keeping, KeptMacs
from transfer.landing import CANCELLED
from transfer.mailbox import Mailbox
from transfer.memory import KvMemory
from transfer.origin import LocalTcp, own_origin
from transfer.outgoing import Outgoing
from transfer.push import PushState
from transfer.receiver import Receiver
from transfer.segments import tile_of
from transfer.sender import Sender
from transfer.slots import SlotPool
from transfer.tally import Tally
from transfer.ticket import Ticket
from transfer.transport import Transport
from transfer.ucx_settings import chooses_transports

# A message for a transfer that is not open: it is late, or there never was such a transfer.
UNKNOWN_TAG = "unknown_tag"

# An answer often comes within microseconds, while falling asleep and being woken takes some twenty.
_BUSY_POLL_SECONDS = 200e-6
# Waking a store for the next lookup takes longer than answering it, so a store polls longer. A worker does not, because
# its steps need the interpreter lock. Nor does a store whose disk is being read: the threads that read need it.
_STORE_BUSY_POLL_SECONDS = 1e-3
# Between GPUs a push takes a millisecond, and half as long again if its threads slept: they wake on other cores, or
# with cold caches. While a transfer is open, bytes may come at any time, so the thread polls on.
_OPEN_BUSY_POLL_SECONDS = 2.0


class Exchange:
    """The methods implement those of `TransferAgent`. All but `counters` must be called from one thread."""

    def __init__(
        self,
        transport: Transport,
        memory: KvMemory,
        config: TransferConfig,
        clock: Callable[[], float],
        emit: Callable[[Event], None],
        refused: Tally,
        lookups: LookupHandler | None,
        author: Author | None,
        draft_layers: int = 0,
        times: StartTimes | None = None,
        segment_bytes: int | None = None,
    ) -> None:
        """`lookups`: set on a store; `author`: set on a worker. `refused` counts refusals of peers' messages, by
        reason.

        `draft_layers`: how many of the memory's layers, the last ones, belong to drafts. `times` records the duration
        of each phase. segment_bytes: the largest segment to ask stores for; by default as large as a slot.
        """
        self._transport = transport
        self._memory = memory
        self._clock = clock
        self._emit = emit
        self._landings: dict[bytes, Incoming] = {}
        self._pushes: dict[bytes, Outgoing] = {}
        self._refused = refused
        self._received_bytes = Tally()
        self._sent_bytes = Tally()
        times = times or StartTimes()
        staging = [memory.allocate_staging(config.slot_bytes)]
        # On a GPU the first allocation compiles the kernels that copy and hash segments, unless an earlier start did.
        times.mark("first-slot")
        staging += [memory.allocate_staging(config.slot_bytes) for _ in range(config.slots - 1)]
        times.mark("slots")
        self._slots = SlotPool(staging)
        # UCX wakes no thread when a transfer between GPUs has completed.
        self.needs_polling = memory.is_on_gpu
        self._mailbox = Mailbox(transport, self._refused)
        # Who was told to use TCP is not warned of it.
        origin = own_origin() if chooses_transports(config.transports) else None
        self._local_tcp = LocalTcp(origin)
        self._receiver = Receiver(
            transport, self._mailbox, memory, self._slots, self._refused, self._received_bytes, self._local_tcp
        )
        self._sender = Sender(transport, self._mailbox, memory, self._slots, self._sent_bytes, origin)
        self._author = author
        self.fetcher = Fetcher(
            transport,
            self._mailbox,
            self._receiver,
            memory,
            config,
            clock,
            self._refused,
            emit,
            author,
            draft_layers,
            segment_bytes or config.slot_bytes,
        )
        self.server: LookupServer | None = None
        self._referrals: Referrals | None = None
        # On a store: the MACs of its blocks.
        self.macs: KeptMacs | None = None
        if lookups is not None:
            self._serve(lookups, memory, config, draft_layers)

    @property
    def in_flight(self) -> bool:
        """Whether UCX or the memory uses one of our buffers, or a fetch is open."""
        parts = (self._receiver, self._sender, self._mailbox, self.fetcher)
        return any(part.in_flight for part in parts)

    @property
    def busy_poll_seconds(self) -> float:
        """How long the transfer thread polls without a pause after it last had work."""
        if self.needs_polling and (self._landings or self._pushes or self.fetcher.open):
            return _OPEN_BUSY_POLL_SECONDS
        if self.server is not None:
            return 0.0 if self.server.awaits_blocks else _STORE_BUSY_POLL_SECONDS
        return _BUSY_POLL_SECONDS if self.in_flight else 0.0

    @property
    def next_deadline(self) -> float | None:
        deadlines = self._receiver.deadlines() + self._sender.deadlines() + self.fetcher.deadlines()
        if self._referrals is not None:
            deadlines += self._referrals.deadlines()
        return min(deadlines, default=None)

    def begin(self) -> None:
        """Call this first, in the thread that will call everything except `counters`."""
        self._memory.enter_thread()

    def poll(self) -> bool:
        """Do what can be done now. Returns whether anything was done."""
        now = self._clock()
        arrived = self._accept_arrivals()
        delivered = self._mailbox.poll()
        self.fetcher.poll(now)
        received = self._receiver.poll(now)
        sent = self._sender.poll(now)
        referred = self._referrals is not None and self._referrals.poll(now)
        return arrived or delivered or received or sent or referred

    def open_landing(self, ticket: Ticket, blocks: Sequence[int]) -> None:
        segments = ticket.segments
        incoming = Incoming(
            sizes=[segment.size_bytes for segment in segments],
            deadline=self._clock() + ticket.deadline_ms / 1000,
            tiles=[tile_of(segment) for segment in segments],
            tag=ticket.tag,
            secret=ticket.secret,
            blocks=blocks,
            on_end=partial(self._end_landing, ticket.transfer_id),
            mac_sink=None if self.macs is None else Keeping(self.macs, blocks),
        )
        self._landings[ticket.transfer_id] = incoming
        self._receiver.open(incoming)

    def cancel_landing(self, transfer_id: bytes) -> None:
        incoming = self._landings.get(transfer_id)
        if incoming is not None:
            self._receiver.give_up(incoming, CANCELLED, "the landing was cancelled")

    def push(self, ticket: Ticket, blocks: Sequence[int], offered: Sequence[bytes] | None = None) -> None:
        segments = ticket.segments
        tiles = [tile_of(segment) for segment in segments]
        outgoing = Outgoing(
            push=PushState(tiles, self._clock() + ticket.deadline_ms / 1000),
            tiles=tiles,
            addresses=[segment.worker_address for segment in segments],
            tag=ticket.tag,
            secret=ticket.secret,
            blocks=blocks,
            ended=partial(self._end_push, ticket.transfer_id),
            macs=None if self._author is None or offered is None else self._author.writes(offered),
            to_store=offered is not None,
        )
        self._pushes[ticket.transfer_id] = outgoing
        self._sender.open(outgoing)

    def ready(self, transfer_id: bytes, layers: int, blocks: int) -> None:
        outgoing = self._pushes.get(transfer_id)
        if outgoing is None:
            # The push ended before its prompt was computed.
            return
        outgoing.push.computed(layers, blocks)
        if outgoing.ready_at is None and outgoing.push.is_ready_unsent:
            outgoing.ready_at = self._clock()

    def cancel_push(self, transfer_id: bytes) -> None:
        outgoing = self._pushes.get(transfer_id)
        if outgoing is not None:
            self._sender.give_up(outgoing, "the push was cancelled")

    def counters(self) -> TransferCounters:
        """Unlike the other methods, this may be called from any thread."""
        return TransferCounters(
            open_landings=len(self._landings),
            open_pushes=len(self._pushes) + (self.server.open if self.server else 0),
            open_fetches=self.fetcher.open,
            total_slots=self._slots.total,
            free_slots=self._slots.free,
            quarantined_slots=self._slots.quarantined,
            received_bytes=dict(self._received_bytes.counts),
            sent_bytes=dict(self._sent_bytes.counts),
            local_tcp_bytes=dict(self._local_tcp.bytes.counts),
            refused=dict(self._refused.counts),
            fetches=self.fetcher.fetches,
            fetched_blocks=self.fetcher.fetched_blocks,
            fetch_bytes_per_second=self.fetcher.rates.memory,
            disk_fetch_bytes_per_second=self.fetcher.rates.disk,
        )

    def _serve(self, lookups: LookupHandler, memory: KvMemory, config: TransferConfig, draft_layers: int) -> None:
        """Answer workers' lookups, as a store does."""
        assert isinstance(memory, HostMemory), "a store's memory is its host's"
        self.macs = KeptMacs(memory.layers, memory.blocks)
        self._referrals = Referrals(memory, self._transport, self._mailbox, self._sent_bytes)
        self.server = LookupServer(
            self._transport,
            self._mailbox,
            self._sender,
            memory,
            config,
            lookups,
            self._clock,
            self._refused,
            self.macs,
            draft_layers,
            self._referrals,
        )

    def _accept_arrivals(self) -> bool:
        arrived = False
        while (arrival := self._transport.next_arrival()) is not None:
            arrived = True
            accepted = (
                self._receiver.accept(arrival)
                or self.fetcher.accept(arrival)
                or (self.server is not None and self.server.accept(arrival))
            )
            if not accepted:
                self._refused.add(UNKNOWN_TAG)
                self._transport.discard(arrival)
            # A store's answer opens the landing for the segments that follow it, so it must be read first.
            self._mailbox.poll()
        return arrived

    def _end_landing(self, transfer_id: bytes, incoming: Incoming) -> None:
        del self._landings[transfer_id]
        failure = incoming.failure
        if failure is None:
            self._emit(Landed(transfer_id, incoming.size_bytes, incoming.transport))
        else:
            self._emit(LandingFailed(transfer_id, failure.reason, failure.message))

    def _end_push(self, transfer_id: bytes, outgoing: Outgoing) -> None:
        del self._pushes[transfer_id]
        error, seconds = outgoing.push.error, None
        if error is None and outgoing.ready_at is not None:
            seconds = self._clock() - outgoing.ready_at
        self._emit(PushEnded(transfer_id, outgoing.sent_bytes, outgoing.transport, error, seconds))
