"""A store's transfer agent with no bytes: landings land when the digests of all their segments were announced."""

import secrets
from collections.abc import Callable, Sequence

from kvstore.slab import Geometry
from mesh.workers import KvNamespace, TransferCounters, WorkerIdentity, WorkerRole
from transfer.agent import LookupHandler
from transfer.events import Event, Granted, Landed, LandingFailed
from transfer.ticket import Segment, SegmentDigest, Ticket

RIGHT_DIGEST = b"right"


class FakeAgent:
    """One segment a block; at most `window` granted and not announced. Any digest but RIGHT_DIGEST fails a landing."""

    address = b"address"

    def __init__(self, namespace: KvNamespace, wake: Callable[[], None], window: int) -> None:
        self.sessions: dict[int, bytes] = {}
        self.cancelled: list[bytes] = []
        self.tickets: list[Ticket] = []
        self.closed = False
        self._namespace = namespace
        self._wake = wake
        self._window = window
        self._granted: dict[bytes, int] = {}
        self._announced: dict[bytes, int] = {}
        self._events: list[Event] = []

    def open_landing(
        self,
        blocks: Sequence[int],
        tokens: int,
        attempt: int,
        deadline_seconds: float,
        sender_slot_bytes: int | None,
    ) -> Ticket:
        segments = tuple(Segment(i, 0, b"address", i, 0, 1, i, 1, 64) for i in range(len(blocks)))
        deadline_ms = int(deadline_seconds * 1000)
        ticket = Ticket(secrets.token_bytes(16), attempt, bytes(32), deadline_ms, self._namespace, segments)
        self.tickets.append(ticket)
        self._granted[ticket.transfer_id] = self._announced[ticket.transfer_id] = 0
        self._grant(ticket)
        return ticket

    def pushed(self, digest: SegmentDigest) -> None:
        ticket = next(each for each in self.tickets if each.transfer_id == digest.transfer_id)
        if digest.digest != RIGHT_DIGEST:
            self.fail(ticket)
            return
        self._announced[ticket.transfer_id] += 1
        if self._announced[ticket.transfer_id] == len(ticket.segments):
            self.tell(Landed(ticket.transfer_id, ticket.size_bytes, "fake"))
        else:
            self._grant(ticket)

    def cancel_landing(self, transfer_id: bytes) -> None:
        self.cancelled.append(transfer_id)
        self.tell(LandingFailed(transfer_id, "CANCELLED", "cancelled"))

    def fail(self, ticket: Ticket) -> None:
        self.tell(LandingFailed(ticket.transfer_id, "WRONG_DIGEST", "wrong"))

    def tell(self, event: Event) -> None:
        self._events.append(event)
        self._wake()

    def events(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    def open_session(self, session_id: int, session_key: bytes) -> None:
        self.sessions[session_id] = session_key

    def close_session(self, session_id: int) -> None:
        del self.sessions[session_id]

    def counters(self) -> TransferCounters:
        return TransferCounters(total_slots=self._window)

    def close(self) -> None:
        self.closed = True

    def _grant(self, ticket: Ticket) -> None:
        first = self._granted[ticket.transfer_id]
        end = min(len(ticket.segments), self._announced[ticket.transfer_id] + self._window)
        self._granted[ticket.transfer_id] = end
        for segment in range(first, end):
            self.tell(Granted(ticket.transfer_id, segment))


class FakeAgents:
    """Opens agents for a center, and keeps them for a test to look at."""

    def __init__(self, window: int = 8) -> None:
        self.window = window
        self.opened: list[FakeAgent] = []

    def __call__(
        self,
        geometry: Geometry,
        blocks: int,
        namespace: KvNamespace,
        lookups: LookupHandler,
        wake: Callable[[], None],
    ) -> FakeAgent:
        self.opened.append(FakeAgent(namespace, wake, self.window))
        return self.opened[-1]


def worker_identity(worker_id: str = "w", **changes: object) -> WorkerIdentity:
    """A worker whose block is 2 layers of 2 KiB; `weights` names its namespace."""
    weights, layers = str(changes.pop("weights", "f")), changes.pop("layers", 2)
    assert isinstance(layers, int)
    values: dict[str, object] = {
        "incarnation": "first",
        "role": WorkerRole.PREFILL,
        "endpoint": f"{worker_id}:1",
        "model": "m",
        "kv_namespace": KvNamespace(weights, "float32", layers, "mla:8+8"),
        "context_tokens": 4096,
        "total_blocks": 64,
        "max_requests": 8,
        "can_prefill": True,
        "block_bytes": 4096,
        **changes,
    }
    return WorkerIdentity(worker_id=worker_id, **values)  # type: ignore[arg-type]
