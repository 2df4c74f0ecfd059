"""Every transfer of one process, for the one thread that carries them out."""

from collections.abc import Callable, Sequence
from functools import partial

from mesh.domain.workers import TransferCounters
from transfer.config import TransferConfig
from transfer.events import Event, Landed, LandingFailed, PushEnded
from transfer.fetch.fetcher import Fetcher
from transfer.fetch.lookup_server import LookupHandler, LookupServer
from transfer.landing import CANCELLED, Landing
from transfer.mailbox import Mailbox
from transfer.memory import KvMemory
from transfer.push import PushState
from transfer.receiver import Incoming, Receiver
from transfer.segments import tile_of
from transfer.sender import Outgoing, Sender
from transfer.slots import SlotPool
from transfer.tally import Tally
from transfer.ticket import Ticket
from transfer.transport import Transport

# What was sent to a transfer that is not open: late, or never heard of.
UNKNOWN_TAG = "unknown_tag"

# An answer often comes within microseconds, and going to sleep and being woken costs some twenty.
_PATIENCE_SECONDS = 200e-6
# Of a store: being woken for the next lookup takes longer than answering it. A worker does not wait for more: its steps
# need the interpreter.
_STORE_PATIENCE_SECONDS = 1e-3
# Between GPUs a push takes a millisecond, and half as long again where threads were asleep: woken, they find neither
# their core nor its caches as they left them. While a transfer is open, bytes may come at any time.
_OPEN_PATIENCE_SECONDS = 2.0


class Exchange:
    """Methods are `TransferAgent`'s. All but `counters` may be called from one thread only."""

    def __init__(
        self,
        transport: Transport,
        memory: KvMemory,
        config: TransferConfig,
        clock: Callable[[], float],
        emit: Callable[[Event], None],
        refused: Tally,
        lookups: LookupHandler | None,
    ) -> None:
        """`refused` counts what is not accepted from peers, by reason."""
        self._transport = transport
        self._memory = memory
        self._clock = clock
        self._emit = emit
        self._landings: dict[bytes, Incoming] = {}
        self._pushes: dict[bytes, Outgoing] = {}
        self._refused = refused
        self._received_bytes = Tally()
        self._sent_bytes = Tally()
        self._slots = SlotPool(config.slots)
        staging = [memory.allocate_staging(config.slot_bytes) for _ in range(config.slots)]
        # CUDA transfers wake nobody.
        self.needs_polling = memory.is_on_gpu
        self._mailbox = Mailbox(transport, self._refused)
        self._receiver = Receiver(
            transport, self._mailbox, memory, self._slots, staging, self._refused, self._received_bytes
        )
        self._sender = Sender(transport, self._mailbox, memory, self._slots, staging, self._sent_bytes)
        self.fetcher = Fetcher(transport, self._mailbox, self._receiver, memory, config, clock, self._refused, emit)
        self.server: LookupServer | None = None
        if lookups is not None:
            self.server = LookupServer(
                transport, self._mailbox, self._sender, memory, config, lookups, clock, self._refused
            )

    @property
    def in_flight(self) -> bool:
        """Whether UCX or the memory holds one of our buffers, or an answer is awaited."""
        parts = (self._receiver, self._sender, self._mailbox, self.fetcher)
        return any(part.in_flight for part in parts)

    @property
    def patience_seconds(self) -> float:
        """How long it looks on after the last thing that happened: see `thread.TransferThread`."""
        if self.needs_polling and (self._landings or self._pushes or self.fetcher.open):
            return _OPEN_PATIENCE_SECONDS
        if self.server is not None:
            return _STORE_PATIENCE_SECONDS
        return _PATIENCE_SECONDS if self.in_flight else 0.0

    @property
    def next_deadline(self) -> float | None:
        deadlines = self._receiver.deadlines() + self._sender.deadlines() + self.fetcher.deadlines()
        return min(deadlines, default=None)

    def begin(self) -> None:
        """The calling thread is the one that calls everything else."""
        self._memory.enter_thread()

    def turn(self) -> bool:
        """Do what can be done now; returns whether there was something."""
        now = self._clock()
        arrived = self._take_arrivals()
        delivered = self._mailbox.turn()
        self.fetcher.turn(now)
        received = self._receiver.turn(now)
        sent = self._sender.turn(now)
        return arrived or delivered or received or sent

    def open_landing(self, ticket: Ticket, blocks: Sequence[int]) -> None:
        segments = ticket.segments
        incoming = Incoming(
            landing=Landing([segment.size_bytes for segment in segments], self._clock() + ticket.deadline_ms / 1000),
            tiles=[tile_of(segment) for segment in segments],
            tag=ticket.tag,
            secret=ticket.secret,
            blocks=blocks,
            ended=partial(self._end_landing, ticket.transfer_id),
        )
        self._landings[ticket.transfer_id] = incoming
        self._receiver.open(incoming)

    def cancel_landing(self, transfer_id: bytes) -> None:
        incoming = self._landings.get(transfer_id)
        if incoming is not None:
            self._receiver.give_up(incoming, CANCELLED, "the landing was cancelled")

    def push(self, ticket: Ticket, blocks: Sequence[int]) -> None:
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
        )
        self._pushes[ticket.transfer_id] = outgoing
        self._sender.open(outgoing)

    def ready(self, transfer_id: bytes, layers: int, blocks: int) -> None:
        outgoing = self._pushes.get(transfer_id)
        if outgoing is None:
            # It ended before its prompt was computed.
            return
        outgoing.push.computed(layers, blocks)
        if outgoing.whole_at is None and outgoing.push.waits_whole:
            outgoing.whole_at = self._clock()

    def cancel_push(self, transfer_id: bytes) -> None:
        outgoing = self._pushes.get(transfer_id)
        if outgoing is not None:
            self._sender.give_up(outgoing, "the push was cancelled")

    def counters(self) -> TransferCounters:
        """Unlike the other methods, it may be called from any thread."""
        return TransferCounters(
            open_landings=len(self._landings),
            open_pushes=len(self._pushes) + (self.server.open if self.server else 0),
            open_fetches=self.fetcher.open,
            total_slots=self._slots.total,
            free_slots=self._slots.free,
            quarantined_slots=self._slots.quarantined,
            received_bytes=dict(self._received_bytes.counts),
            sent_bytes=dict(self._sent_bytes.counts),
            refused=dict(self._refused.counts),
            fetches=self.fetcher.fetches,
            fetched_blocks=self.fetcher.fetched_blocks,
            fetch_bytes_per_second=self.fetcher.bytes_per_second,
        )

    def _take_arrivals(self) -> bool:
        arrived = False
        while (arrival := self._transport.next_arrival()) is not None:
            arrived = True
            taken = (
                self._receiver.arrive(arrival)
                or self.fetcher.arrive(arrival)
                or (self.server is not None and self.server.arrive(arrival))
            )
            if not taken:
                self._refused.add(UNKNOWN_TAG)
                self._transport.discard(arrival)
            # A store's first answer tells what the segments behind it are.
            self._mailbox.turn()
        return arrived

    def _end_landing(self, transfer_id: bytes, incoming: Incoming) -> None:
        del self._landings[transfer_id]
        failure = incoming.landing.failure
        if failure is None:
            self._emit(Landed(transfer_id, incoming.landing.size_bytes, incoming.transport))
        else:
            self._emit(LandingFailed(transfer_id, failure.reason, failure.message))

    def _end_push(self, transfer_id: bytes, outgoing: Outgoing) -> None:
        del self._pushes[transfer_id]
        error, seconds = outgoing.push.error, None
        if error is None and outgoing.whole_at is not None:
            seconds = self._clock() - outgoing.whole_at
        self._emit(PushEnded(transfer_id, outgoing.sent_bytes, outgoing.transport, error, seconds))
