"""Everything that moves KV in one process: a thread that owns the UCX worker, staging slots, landings and pushes."""

from collections.abc import Callable, Sequence
from typing import Protocol

from mesh.workers import KvNamespace, TransferCounters
from transfer.config import TransferConfig
from transfer.events import Event
from transfer.memory import KvMemory
from transfer.ticket import SegmentDigest, StoreSession, Ticket


class LookupHandler(Protocol):
    """The store's side of `fetch`, called from the transfer thread: quick, and raising nothing."""

    def match(self, session_id: int, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix of the chain, leased until `release`. May be empty."""
        ...

    def release(self, session_id: int, blocks: Sequence[int]) -> None:
        """They were sent, or will not be."""
        ...


class TransferAgent:
    """All methods are thread-safe, return at once, and never raise for what a peer does: that comes as an event."""

    def __init__(
        self,
        memory: KvMemory,
        namespace: KvNamespace,
        config: TransferConfig,
        clock: Callable[[], float],
        wake: Callable[[], None],
        lookups: LookupHandler | None = None,
    ) -> None:
        """`lookups` makes it a store. `wake` is called, from the transfer thread, when `events` has something new."""
        raise NotImplementedError

    @property
    def address(self) -> bytes:
        """UCX worker address."""
        raise NotImplementedError

    def events(self) -> list[Event]:
        """What happened since the last call, in order."""
        raise NotImplementedError

    # Receiving.

    def open_landing(self, blocks: Sequence[int], tokens: int, attempt: int, deadline_seconds: float) -> Ticket:
        """Open a landing for these blocks (in chain order), all layers.

        `tokens` of the whole prompt decide between whole and layerwise segments. Granted events follow as slots come
        free; exactly one Landed or LandingFailed ends it.
        """
        raise NotImplementedError

    def pushed(self, digest: SegmentDigest) -> None:
        """The sender says that it pushed a segment. Unknown transfers are counted and ignored."""
        raise NotImplementedError

    def cancel_landing(self, transfer_id: bytes) -> None:
        """Give it up; LandingFailed follows once nothing can write to its blocks."""
        raise NotImplementedError

    # Sending.

    def push(self, ticket: Ticket, blocks: Sequence[int]) -> None:
        """Send these blocks (the landing's, in chain order) as segments become both `granted` and `ready`.

        Raises InvalidRequest for a ticket that does not fit the blocks, NamespaceMismatch for another namespace.
        Exactly one PushEnded ends it.
        """
        raise NotImplementedError

    def granted(self, transfer_id: bytes, segment: int) -> None:
        """The receiver has a slot for this segment."""
        raise NotImplementedError

    def ready(self, transfer_id: bytes, layers: int, blocks: int) -> None:
        """The first `layers` layers of the push's first `blocks` blocks are computed, beside what was said before."""
        raise NotImplementedError

    def cancel_push(self, transfer_id: bytes) -> None:
        """Stop it; PushEnded follows once UCX reads none of its blocks."""
        raise NotImplementedError

    # The store.

    def attach_store(self, session: StoreSession) -> None:
        """Use this session from now on; replaces an earlier one with the same store."""
        raise NotImplementedError

    def detach_store(self, store_id: str) -> None:
        """Forget it; fetches under way answer with what has landed."""
        raise NotImplementedError

    def fetch(self, fetch_id: int, store_id: str, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Look up these hashes of a chain and land what matches in `blocks` (equal in number).

        One UCX message there, blocks back; Fetched follows within the configured deadline.
        """
        raise NotImplementedError

    def open_session(self, session_id: int, session_key: bytes) -> None:
        """As the store: answer fetches that carry this session's MAC; all others are refused and counted."""
        raise NotImplementedError

    def close_session(self, session_id: int) -> None:
        """As the store: its lease is over."""
        raise NotImplementedError

    def counters(self) -> TransferCounters:
        """Totals since the start, and what is open now, for status, metrics and leak tests."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the thread; every open transfer ends without an event."""
        raise NotImplementedError
