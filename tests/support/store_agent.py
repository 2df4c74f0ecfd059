"""A store's transfer agent that moves no bytes: landings end when a test says so."""

import secrets
from collections.abc import Callable, Sequence

from kvstore.store_memory import StoreMemory
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.workers import TransferCounters, WorkerIdentity, WorkerRole
from transfer.events import Event, Landed, LandingFailed
from transfer.fetch.lookup_server import LookupHandler
from transfer.kept_macs import KeptMacs
from transfer.ticket import Segment, Ticket


class FakeAgent:
    """A landing has one segment for each block."""

    address = b"address"

    def __init__(self, namespace: KvNamespace, wake: Callable[[], None]) -> None:
        self.sessions: dict[int, bytes] = {}
        self.cancelled: list[bytes] = []
        # Tickets by transfer id, in the order in which they were issued.
        self.tickets: dict[bytes, Ticket] = {}
        self.closed = False
        self.macs = KeptMacs(1, 1)
        self._namespace = namespace
        self._wake = wake
        self._events: list[Event] = []

    def open_landing(
        self,
        blocks: Sequence[int],
        tokens: int,
        attempt: int,
        deadline_seconds: float,
        sender_slot_bytes: int | None,
        with_drafts: bool,
    ) -> Ticket:
        segments = tuple(Segment(i, 0, b"address", 0, 1, i, 1, 64) for i in range(len(blocks)))
        deadline_ms = int(deadline_seconds * 1000)
        ticket = Ticket(secrets.token_bytes(16), attempt, bytes(32), 0, deadline_ms, self._namespace, segments)
        self.tickets[ticket.transfer_id] = ticket
        return ticket

    def cancel_landing(self, transfer_id: bytes) -> None:
        self.cancelled.append(transfer_id)
        self._tell(LandingFailed(transfer_id, "CANCELLED", "cancelled"))

    def land(self, transfer_id: bytes) -> None:
        """End a landing: all of it arrived and was accepted."""
        self._tell(Landed(transfer_id, self.tickets[transfer_id].size_bytes, "fake"))

    def disbelieve(self, transfer_id: bytes) -> None:
        """Fail a landing: a segment arrived that differs from what its sender announced."""
        self._tell(LandingFailed(transfer_id, "NOT_BELIEVED", "wrong"))

    def events(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    def open_session(self, session_id: int, session_key: bytes) -> None:
        self.sessions[session_id] = session_key

    def close_session(self, session_id: int) -> None:
        del self.sessions[session_id]

    def blocks_read(self, session_id: int, sequence: int, ready: int, over: bool) -> None:
        """Nothing to do, because no test looks up blocks here."""

    def counters(self) -> TransferCounters:
        return TransferCounters()

    def close(self) -> None:
        self.closed = True

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        self._wake()


class FakeAgents:
    """Opens agents for a store's center, and keeps them for a test to inspect."""

    def __init__(self) -> None:
        self.opened: list[FakeAgent] = []

    def __call__(
        self,
        memory: StoreMemory,
        namespace: KvNamespace,
        lookups: LookupHandler,
        wake: Callable[[], None],
    ) -> FakeAgent:
        self.opened.append(FakeAgent(namespace, wake))
        return self.opened[-1]


def worker_identity(worker_id: str = "w", **changes: object) -> WorkerIdentity:
    """The identity of a worker whose block is 2 layers of 2 KiB. changes: `weights` names its namespace."""
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
        "vocabulary_size": 1000,
        "block_bytes": 4096,
        "worker_class": "none",
        "max_step_tokens": 1024,
        **changes,
    }
    return WorkerIdentity(worker_id=worker_id, **values)  # type: ignore[arg-type]
