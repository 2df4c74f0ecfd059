"""Moves KV in simulated time: what `engine.moves` needs of `transfer.agent.TransferAgent`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from mesh.costs import CostModel
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.workers import TransferCounters
from mesh.observe.tracing import TraceContext
from sim.network import Link
from sim.store import SimulatedStore
from sim.timeline import Timeline
from transfer.events import Event, Fetched, Landed, LandingFailed, PushEnded
from transfer.ticket import StoreSession, Ticket

# Weight of the earlier fetches in the moving average of the fetch rate; a new fetch has the rest.
FETCH_DECAY = 0.9
TRANSPORT = "simulated"


@dataclass(slots=True)
class _Push:
    transfer_id: bytes
    total_blocks: int
    whole_since: float | None = None
    # Blocks that have been ready in all layers, bytes that the link has been given, and bytes that have arrived.
    whole_blocks: int = 0
    given_bytes: int = 0
    arrived_bytes: int = 0
    early: bool = False
    ended: bool = False


class SimulatedLandings:
    """Which agent receives a transfer. One for the whole network."""

    def __init__(self) -> None:
        self.receivers: dict[bytes, SimulatedAgent] = {}
        self._made = 0

    def open(self, receiver: "SimulatedAgent") -> bytes:
        self._made += 1
        transfer_id = self._made.to_bytes(16, "big")
        self.receivers[transfer_id] = receiver
        return transfer_id


class SimulatedAgent:
    """One process's transfers. `wake` is called whenever `events` has something new."""

    def __init__(
        self,
        timeline: Timeline,
        landings: SimulatedLandings,
        link: Link,
        stores: Mapping[str, SimulatedStore],
        namespace: KvNamespace,
        block_bytes: int,
        costs: CostModel,
        moment: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        """moment: the engine's time, which is ahead of the timeline's while a step is computed."""
        self.link = link
        self.alive = True
        self._timeline = timeline
        self._landings = landings
        self._stores = stores
        self._namespace = namespace
        self._block_bytes = block_bytes
        self._costs = costs
        self._moment = moment
        self._wake = wake
        self._events: list[Event] = []
        self._pushes: dict[bytes, _Push] = {}
        self._counters = TransferCounters()
        self._fetch_rate: float | None = None

    def events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def counters(self) -> TransferCounters:
        return self._counters

    def open_landing(
        self,
        blocks: Sequence[int],
        tokens: int,
        attempt: int,
        deadline_seconds: float,
        sender_slot_bytes: int | None,
        with_drafts: bool,
    ) -> Ticket:
        transfer_id = self._landings.open(self)
        return Ticket(transfer_id, attempt, b"", 0, int(deadline_seconds * 1000), self._namespace, ())

    def cancel_landing(self, transfer_id: bytes) -> None:
        if self._landings.receivers.pop(transfer_id, None) is not None:
            self._emit(LandingFailed(transfer_id, "CANCELLED", "the landing was given up"))

    def push(self, ticket: Ticket, blocks: Sequence[int], offered: Sequence[bytes] | None = None) -> None:
        self._pushes[ticket.transfer_id] = _Push(ticket.transfer_id, len(blocks))

    def ready(self, transfer_id: bytes, layers: int, blocks: int) -> None:
        """The first `blocks` blocks have their KV in the first `layers` layers, from the engine's present time on."""
        self._timeline.at(self._moment(), lambda: self._send(transfer_id, layers, blocks))

    def _send(self, transfer_id: bytes, layers: int, blocks: int) -> None:
        push = self._pushes.get(transfer_id)
        if push is None:
            return
        whole = layers == self._namespace.layers
        partial = (blocks - push.whole_blocks) * self._block_bytes * layers // self._namespace.layers
        ready_bytes = push.whole_blocks * self._block_bytes + partial
        if whole:
            push.whole_blocks = blocks
            if blocks == push.total_blocks:
                push.whole_since = self._timeline.now
        else:
            push.early = True
        size_bytes = ready_bytes - push.given_bytes
        if size_bytes > 0 or push.whole_since is not None:
            push.given_bytes = max(ready_bytes, push.given_bytes)
            self.link.send(max(0, size_bytes), lambda: self._arrived(push, max(0, size_bytes)))

    def cancel_push(self, transfer_id: bytes) -> None:
        push = self._pushes.get(transfer_id)
        if push is not None:
            self._end(push, "cancelled")

    def fetch(
        self,
        fetch_id: int,
        store_id: str,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        span: TraceContext | None = None,
    ) -> None:
        store, asked_at = self._stores[store_id], self._timeline.now
        leased = store.lease(self._namespace, hashes)
        size_bytes = len(leased) * self._block_bytes

        def fetched() -> None:
            store.directory.release(leased)
            seconds = self._timeline.now - asked_at
            if leased:
                self._observe_fetch(len(leased), size_bytes / seconds if seconds else None)
            self._emit(Fetched(fetch_id, len(leased), size_bytes, seconds))

        store.link.send(size_bytes, fetched, self._costs.fetch_latency_ms / 1000)

    def attach_store(self, session: StoreSession) -> None:
        """Stores need no session here."""

    def detach_store(self, store_id: str) -> None:
        """Stores need no session here."""

    def die(self) -> None:
        self.alive = False
        for push in list(self._pushes.values()):
            self._end(push, "the process died")

    def _arrived(self, push: _Push, size_bytes: int) -> None:
        push.arrived_bytes += size_bytes
        if push.ended or push.whole_since is None or push.arrived_bytes < push.given_bytes:
            return
        receiver = self._landings.receivers.pop(push.transfer_id, None)
        if receiver is None:
            self._end(push, "the landing is gone")
            return
        receiver.land(push.transfer_id, push.arrived_bytes)
        self._end(push, None)

    def land(self, transfer_id: bytes, size_bytes: int) -> None:
        """All bytes of a landing of this process have arrived. Its engine is told after the handover's last calls."""
        self._timeline.after(
            self._costs.handover_ms / 2000, lambda: self._emit(Landed(transfer_id, size_bytes, TRANSPORT))
        )

    def _end(self, push: _Push, error: str | None) -> None:
        del self._pushes[push.transfer_id]
        push.ended = True
        seconds = None
        if error is None and not push.early and push.whole_since is not None:
            seconds = self._timeline.now - push.whole_since
        self._emit(PushEnded(push.transfer_id, push.arrived_bytes, TRANSPORT, error, seconds))

    def _observe_fetch(self, blocks: int, rate: float | None) -> None:
        if rate is not None:
            before = self._fetch_rate
            self._fetch_rate = rate if before is None else before * FETCH_DECAY + rate * (1 - FETCH_DECAY)
        self._counters = msgspec.structs.replace(
            self._counters,
            fetches=self._counters.fetches + 1,
            fetched_blocks=self._counters.fetched_blocks + blocks,
            fetch_bytes_per_second=self._fetch_rate,
        )

    def _emit(self, event: Event) -> None:
        if self.alive:
            self._events.append(event)
            self._wake()
