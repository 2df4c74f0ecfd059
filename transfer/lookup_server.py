"""The store's side of fetches: lookups are checked, matched, answered, and their blocks pushed."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from mesh.blocks import HASH_BYTES
from transfer.config import TransferConfig
from transfer.fetcher import OVERSIZED_MESSAGE, REPLAYED_MESSAGE, WRONG_MAC
from transfer.landing import WRONG_SIZE
from transfer.lookup import (
    MAX_HASHES,
    MAX_MESSAGE_BYTES,
    TAG_OF_KIND,
    Answer,
    Credit,
    Kind,
    Lookup,
    SentSegment,
    fetch_key,
    seal,
    session_of,
    split_hashes,
    unseal,
)
from transfer.mailbox import Mailbox
from transfer.memory import KvMemory
from transfer.push import Push
from transfer.replay import ReplayWindow
from transfer.segments import plan_whole
from transfer.sender import Outgoing, Sender, Sent
from transfer.transport import Arrival, Transport

UNKNOWN_SESSION = "unknown_session"


class LookupHandler(Protocol):
    """The store's side of `fetch`, called from the transfer thread: quick, and raising nothing."""

    def match(self, session_id: int, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix of the chain, leased until `release`. May be empty."""
        ...

    def release(self, session_id: int, blocks: Sequence[int]) -> None:
        """They were sent, or will not be."""
        ...


@dataclass(eq=False)
class _Session:
    session_id: int
    key: bytes
    taken: ReplayWindow = field(default_factory=ReplayWindow)


class LookupServer:
    """Answers each lookup of an open session once; every other one is refused, counted, and not answered."""

    def __init__(
        self,
        transport: Transport,
        mailbox: Mailbox,
        sender: Sender,
        memory: KvMemory,
        config: TransferConfig,
        handler: LookupHandler,
        clock: Callable[[], float],
        refused: Counter[str],
    ) -> None:
        self._transport = transport
        self._mailbox = mailbox
        self._sender = sender
        self._memory = memory
        self._segment_bytes = config.slot_bytes
        # Blocks are held for one answer for so long at most.
        self._seconds = config.landing_seconds
        self._handler = handler
        self._clock = clock
        self._refused = refused
        self._sessions: dict[int, _Session] = {}
        # Answers under way, by session and the lookup's sequence.
        self._open: dict[tuple[int, int], Outgoing] = {}

    @property
    def open(self) -> int:
        """Answers under way."""
        return len(self._open)

    def open_session(self, session_id: int, key: bytes) -> None:
        """A session that is open already keeps its count of messages: a lease may be renewed at any time."""
        known = self._sessions.get(session_id)
        if known is None or known.key != key:
            self._sessions[session_id] = _Session(session_id, key)

    def close_session(self, session_id: int) -> None:
        self._sessions.pop(session_id, None)
        for (owner, _), outgoing in list(self._open.items()):
            if owner == session_id:
                self._sender.give_up(outgoing, "the session was closed")

    def arrive(self, arrival: Arrival) -> bool:
        """Take a lookup or a credit. False for other messages."""
        if arrival.tag == TAG_OF_KIND[Kind.LOOKUP]:
            deliver = self._on_lookup
        elif arrival.tag == TAG_OF_KIND[Kind.CREDIT]:
            deliver = self._on_credit
        else:
            return False
        if arrival.size_bytes > MAX_MESSAGE_BYTES:
            self._refused[OVERSIZED_MESSAGE] += 1
            self._transport.discard(arrival)
        else:
            self._mailbox.take(arrival, deliver)
        return True

    def _on_lookup(self, sealed: bytes) -> None:
        session = self._session_of(sealed)
        lookup = unseal(Kind.LOOKUP, session.key, sealed, Lookup) if session else None
        if session is None or not self._is_fresh(session, lookup):
            return
        assert lookup is not None
        if not self._fits(lookup):
            self._refused[WRONG_SIZE] += 1
            self._answer(session, lookup, [])
            return
        self._answer(session, lookup, self._handler.match(session.session_id, split_hashes(lookup.hashes)))

    def _on_credit(self, sealed: bytes) -> None:
        session = self._session_of(sealed)
        credit = unseal(Kind.CREDIT, session.key, sealed, Credit) if session else None
        if session is None or not self._is_fresh(session, credit):
            return
        assert credit is not None
        outgoing = self._open.get((session.session_id, credit.lookup))
        if outgoing is not None:
            self._grant(outgoing, credit.credits)

    def _session_of(self, sealed: bytes) -> _Session | None:
        session_id = session_of(sealed)
        session = self._sessions.get(session_id) if session_id is not None else None
        if session is None:
            self._refused[UNKNOWN_SESSION] += 1
        return session

    def _is_fresh(self, session: _Session, message: Lookup | Credit | None) -> bool:
        if message is None:
            self._refused[WRONG_MAC] += 1
        elif session.taken.take(message.sequence):
            return True
        else:
            self._refused[REPLAYED_MESSAGE] += 1
        return False

    def _fits(self, lookup: Lookup) -> bool:
        return (
            lookup.layers == self._memory.layers
            and lookup.piece_bytes == self._memory.piece_bytes
            and lookup.segment_bytes >= lookup.piece_bytes
            and len(lookup.hashes) % HASH_BYTES == 0
            and len(lookup.hashes) <= MAX_HASHES * HASH_BYTES
        )

    def _answer(self, session: _Session, lookup: Lookup, blocks: list[int]) -> None:
        segment_bytes = min(self._segment_bytes, lookup.segment_bytes)
        self._tell(session, lookup, Answer(lookup.sequence, len(blocks), segment_bytes))
        if not blocks:
            return
        tiles = plan_whole(self._memory.layers, len(blocks), self._memory.piece_bytes, segment_bytes)
        push = Push(tiles, self._clock() + min(lookup.deadline_ms / 1000, self._seconds))
        push.computed(self._memory.layers, len(blocks))
        outgoing = Outgoing(
            push=push,
            tiles=tiles,
            addresses=[lookup.worker_address] * len(tiles),
            tags=range(lookup.answer_tag + 1, lookup.answer_tag + 1 + len(tiles)),
            blocks=blocks,
            key=fetch_key(session.key, lookup.sequence),
            announce=partial(self._sent, session, lookup, Answer(lookup.sequence, len(blocks), segment_bytes)),
            ended=partial(self._ended, session, lookup),
        )
        self._open[session.session_id, lookup.sequence] = outgoing
        self._grant(outgoing, lookup.credits)
        self._sender.open(outgoing)

    def _grant(self, outgoing: Outgoing, credits: int) -> None:
        for segment in range(min(credits, len(outgoing.tiles))):
            outgoing.push.grant(segment)

    def _sent(self, session: _Session, lookup: Lookup, answer: Answer, sent: Sent) -> None:
        segment = SentSegment(sent.index, sent.size_bytes, sent.digest, sent.transport)
        self._tell(session, lookup, Answer(answer.lookup, answer.matched, answer.segment_bytes, segment))

    def _tell(self, session: _Session, lookup: Lookup, answer: Answer) -> None:
        sealed = seal(Kind.ANSWER, session.session_id, session.key, answer)
        self._mailbox.send(lookup.worker_address, lookup.answer_tag, sealed)

    def _ended(self, session: _Session, lookup: Lookup, outgoing: Outgoing) -> None:
        del self._open[session.session_id, lookup.sequence]
        self._handler.release(session.session_id, outgoing.blocks)
