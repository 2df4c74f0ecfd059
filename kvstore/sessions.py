"""The attached ranks: each has a session with a key and a lease, which it renews by attaching again."""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from mesh.domain.kv_identity import KvNamespace
from mesh.domain.workers import WorkerIdentity
from mesh.errors import Overloaded, UnknownSession
from mesh.observe.metrics import KVSTORE_SESSIONS

log = logging.getLogger(__name__)

SESSION_KEY_BYTES = 32
# Random, so that a session of an earlier epoch is not mistaken for another's; they fit a signed 64-bit integer.
_SESSION_ID_BITS = 62


@dataclass(slots=True)
class RankSession:
    """The attachment of one rank of a worker. Written only by RankSessions."""

    session_id: int
    key: bytes
    worker_id: str
    rank: int
    namespace: KvNamespace
    # Digest of the namespace.
    digest: bytes
    # The largest segment that the worker sends; None if it does not say.
    slot_bytes: int | None
    expires_at: float


class RankSessions:
    """Owns every session. `closed` is called with each session that ends; `clock` is monotonic, in seconds."""

    def __init__(
        self, clock: Callable[[], float], lease_seconds: float, limit: int, closed: Callable[[RankSession], None]
    ) -> None:
        self.lease_seconds = lease_seconds
        self._clock = clock
        self._limit = limit
        self._closed = closed
        self._by_id: dict[int, RankSession] = {}
        # Keyed by worker id and rank.
        self._by_rank: dict[tuple[str, int], RankSession] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def workers(self) -> int:
        return len({worker_id for worker_id, _ in self._by_rank})

    def attach(self, worker: WorkerIdentity, rank: int, session_id: int) -> RankSession:
        """Renew this session of the rank. If the rank has another session, or session_id is 0, end that one and open a
        new one.

        Raises Overloaded if there are too many sessions.
        """
        self.expire()
        session = self._by_rank.get((worker.worker_id, rank))
        if session is not None and (session.session_id, session.namespace) != (session_id, worker.kv_namespace):
            self._close(session)
            session = None
        if session is None:
            session = self._open(worker, rank)
        session.expires_at = self._clock() + self.lease_seconds
        return session

    def get(self, session_id: int) -> RankSession:
        """Raises UnknownSession if there never was such a session, or if its lease has run out."""
        self.expire()
        session = self._by_id.get(session_id)
        if session is None:
            raise UnknownSession("no such session: attach to this store again")
        return session

    def expire(self) -> None:
        """End the sessions whose lease has run out."""
        now = self._clock()
        for session in [each for each in self._by_id.values() if each.expires_at <= now]:
            self._close(session)

    def _open(self, worker: WorkerIdentity, rank: int) -> RankSession:
        if len(self._by_id) >= self._limit:
            raise Overloaded(f"the store keeps at most {self._limit} sessions", retry_after_ms=10_000)
        session = RankSession(
            session_id=1 + secrets.randbits(_SESSION_ID_BITS),
            key=secrets.token_bytes(SESSION_KEY_BYTES),
            worker_id=worker.worker_id,
            rank=rank,
            namespace=worker.kv_namespace,
            digest=worker.kv_namespace.digest,
            slot_bytes=worker.slot_bytes,
            expires_at=0.0,
        )
        self._by_id[session.session_id] = self._by_rank[worker.worker_id, rank] = session
        KVSTORE_SESSIONS.set(len(self._by_id))
        log.info("worker attached", extra={"fields": {"id": worker.worker_id, "rank": rank}})
        return session

    def _close(self, session: RankSession) -> None:
        del self._by_id[session.session_id]
        del self._by_rank[session.worker_id, session.rank]
        KVSTORE_SESSIONS.set(len(self._by_id))
        log.info("worker detached", extra={"fields": {"id": session.worker_id, "rank": session.rank}})
        self._closed(session)
