"""The store's side of fetches: it checks, matches and answers lookups, and pushes their blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from mesh.blocks import HASH_BYTES
from mesh.observe.spans import span
from mesh.observe.tracing import TraceContext
from transfer.config import TransferConfig
from transfer.fetch.lookup import (
    MAX_HASHES,
    MAX_LOOKUP_BYTES,
    MAX_RECEIPT_BYTES,
    Answer,
    Lookup,
    Receipt,
    fetch_key,
    split_hashes,
    split_session_message,
)
from transfer.fetch.referrals import PART_BYTES, Referrals
from transfer.fetch.replay import REPLAYED_MESSAGE, ReplayWindow
from transfer.kept_macs import Keeping, KeptMacs
from transfer.landing import WRONG_SIZE
from transfer.mailbox import Mailbox
from transfer.memory import KvMemory
from transfer.outgoing import Outgoing
from transfer.push import PushState
from transfer.seal import WRONG_MAC, Kind, seal, unseal
from transfer.segments import Parts, plan_parts
from transfer.sender import Sender
from transfer.tags import LOOKUP_TAG, RECEIPT_TAG, are_landing_tags, landing_tag_after
from transfer.tally import Tally
from transfer.transport import Arrival, Transport

UNKNOWN_SESSION = "unknown_session"


class Found(NamedTuple):
    """The result of a lookup."""

    blocks: list[int]
    # How many leading blocks have their bytes; `TransferAgent.blocks_read` reports the others later.
    ready: int
    # How many leading blocks have draft layers.
    drafted: int = 0


class LookupHandler(Protocol):
    """How a store finds a lookup's blocks. The transfer thread calls it, so it must be quick and raise nothing."""

    def match(self, session_id: int, sequence: int, hashes: Sequence[bytes]) -> Found:
        """The longest known prefix of the chain, leased until `release`.

        The session and the lookup's sequence number identify the answer.
        """
        ...

    def release(self, session_id: int, sequence: int, blocks: Sequence[int]) -> None:
        """The blocks were sent, or will not be sent."""
        ...


@dataclass(eq=False)
class _Session:
    session_id: int
    key: bytes
    replays: ReplayWindow = field(default_factory=ReplayWindow)


@dataclass(eq=False)
class _Open:
    """An answer whose blocks are being pushed, or copied by the worker."""

    session: _Session
    lookup: Lookup
    outgoing: Outgoing
    carrier: Sender | Referrals
    # How many of its blocks have not got their bytes yet.
    lacking: int

    def give_up(self, error: str) -> None:
        self.carrier.give_up(self.outgoing, error)


class LookupServer:
    """Answers each lookup of an open session once. Any other lookup is refused, counted and not answered."""

    def __init__(
        self,
        transport: Transport,
        mailbox: Mailbox,
        sender: Sender,
        memory: KvMemory,
        config: TransferConfig,
        handler: LookupHandler,
        clock: Callable[[], float],
        refused: Tally,
        kept: KeptMacs,
        draft_layers: int,
        referrals: Referrals,
    ) -> None:
        """draft_layers: how many of the memory's layers, the last ones, belong to drafts. referrals: for workers
        that have mapped the memory.
        """
        self._referrals = referrals
        self._kept = kept
        self._draft_layers = draft_layers
        self._transport = transport
        self._mailbox = mailbox
        self._sender = sender
        self._memory = memory
        self._segment_bytes = config.slot_bytes
        # Longest time that an answer holds its blocks.
        self._seconds = config.landing_seconds
        self._handler = handler
        self._clock = clock
        self._refused = refused
        self._sessions: dict[int, _Session] = {}
        # Answers in progress, by session and the lookup's sequence number.
        self._open: dict[tuple[int, int], _Open] = {}

    @property
    def open(self) -> int:
        """Number of answers in progress."""
        return len(self._open)

    @property
    def awaits_blocks(self) -> bool:
        """Whether an answer in progress waits for blocks that are being read."""
        return any(answer.lacking for answer in self._open.values())

    def open_session(self, session_id: int, key: bytes) -> None:
        """Open a session. Opening it again keeps its count of messages, so its lease can be renewed at any time."""
        known = self._sessions.get(session_id)
        if known is None or known.key != key:
            self._sessions[session_id] = _Session(session_id, key)

    def close_session(self, session_id: int) -> None:
        self._sessions.pop(session_id, None)
        for (owner, _), answer in list(self._open.items()):
            if owner == session_id:
                answer.give_up("the session was closed")

    def blocks_read(self, session_id: int, sequence: int, ready: int, over: bool) -> None:
        """The first `ready` blocks of an answer now have their bytes. `over`: the others will not come."""
        answer = self._open.get((session_id, sequence))
        if answer is None:
            return
        if over:
            # This answer ends the worker's fetch, which would otherwise wait for the missing blocks.
            segment_bytes = answer.lookup.segment_bytes
            self._send_answer(answer.session, answer.lookup, Answer(answer.lookup.sequence, ready, segment_bytes))
            answer.give_up("the blocks could not be read")
        else:
            answer.outgoing.push.computed(self._memory.layers, ready)
            answer.lacking = len(answer.outgoing.blocks) - ready

    def accept(self, arrival: Arrival) -> bool:
        """Receive a lookup or a receipt. False for other messages."""
        if arrival.tag == LOOKUP_TAG:
            self._mailbox.receive(arrival, MAX_LOOKUP_BYTES, self._on_lookup)
        elif arrival.tag == RECEIPT_TAG:
            self._mailbox.receive(arrival, MAX_RECEIPT_BYTES, self._on_receipt)
        else:
            return False
        return True

    def _on_receipt(self, message: bytes) -> None:
        session, sealed = self._session_of(message)
        if session is None:
            return
        receipt = unseal(Kind.RECEIPT, session.key, sealed, Receipt)
        if receipt is None:
            self._refused.add(WRONG_MAC)
            return
        # It may be late: its answer may have been given up.
        answer = self._open.get((session.session_id, receipt.lookup))
        if answer is not None and answer.carrier is self._referrals:
            if receipt.confirm:
                matched, segment_bytes = len(answer.outgoing.blocks), answer.lookup.segment_bytes
                confirmed = Answer(receipt.lookup, matched, segment_bytes, mapped=True, confirmed=True)
                self._send_answer(session, answer.lookup, confirmed)
            self._referrals.copied(answer.outgoing)

    def _session_of(self, message: bytes) -> tuple[_Session | None, bytes]:
        """The session that sent the message, if it is open, and the sealed part."""
        session_id, sealed = split_session_message(message) or (None, b"")
        session = self._sessions.get(session_id) if session_id is not None else None
        if session is None:
            self._refused.add(UNKNOWN_SESSION)
        return session, sealed

    def _on_lookup(self, message: bytes) -> None:
        session, sealed = self._session_of(message)
        if session is None:
            return
        lookup = unseal(Kind.LOOKUP, session.key, sealed, Lookup)
        if lookup is None:
            self._refused.add(WRONG_MAC)
        elif not session.replays.accept(lookup.sequence):
            self._refused.add(REPLAYED_MESSAGE)
        elif not self._may_answer(lookup):
            self._refused.add(WRONG_SIZE)
        else:
            life = span("kvstore.fetch").begin(TraceContext.parse(lookup.traceparent))
            if not self._fits(lookup):
                self._refused.add(WRONG_SIZE)
                self._answer(session, lookup, Found([], 0), life)
                return
            found = self._handler.match(session.session_id, lookup.sequence, split_hashes(lookup.hashes))
            self._answer(session, lookup, found, life)

    def _may_answer(self, lookup: Lookup) -> bool:
        """Whether the tags for the answer and for all messages that may follow it lie in the range of landing tags."""
        pieces = self._memory.layers * (len(lookup.hashes) // HASH_BYTES)
        return lookup.answer_tag >= 0 and are_landing_tags(landing_tag_after(lookup.answer_tag), pieces)

    def _fits(self, lookup: Lookup) -> bool:
        return (
            lookup.draft_layers >= 0
            and lookup.layers - lookup.draft_layers == self._memory.layers - self._draft_layers
            and lookup.piece_bytes == self._memory.piece_bytes
            and lookup.segment_bytes >= lookup.piece_bytes
            and len(lookup.hashes) % HASH_BYTES == 0
            and len(lookup.hashes) <= MAX_HASHES * HASH_BYTES
        )

    def _answer(self, session: _Session, lookup: Lookup, found: Found, life: span) -> None:
        blocks = found.blocks
        segment_bytes = min(self._segment_bytes, lookup.segment_bytes)
        if lookup.mapped:
            segment_bytes = min(segment_bytes, max(PART_BYTES, self._memory.piece_bytes))
        drafted = found.drafted if lookup.draft_layers == self._draft_layers else 0
        answer = Answer(lookup.sequence, len(blocks), segment_bytes, found.ready, drafted, lookup.mapped)
        self._send_answer(session, lookup, answer)
        if not blocks:
            life.end(blocks=0)
            return
        parts = Parts(self._memory.layers - self._draft_layers, self._draft_layers)
        tiles = plan_parts(parts, len(blocks), drafted, self._memory.piece_bytes, segment_bytes)
        push = PushState(tiles, self._clock() + min(lookup.deadline_ms / 1000, self._seconds))
        if found.ready:
            push.computed(self._memory.layers, found.ready)
        outgoing = Outgoing(
            push=push,
            tiles=tiles,
            addresses=[lookup.worker_address] * len(tiles),
            tag=landing_tag_after(lookup.answer_tag),
            secret=fetch_key(session.key, lookup.sequence),
            blocks=blocks,
            ended=partial(self._ended, session, lookup, life),
            macs=Keeping(self._kept, blocks) if lookup.with_macs else None,
        )
        carrier = self._referrals if lookup.mapped else self._sender
        self._open[session.session_id, lookup.sequence] = _Open(
            session, lookup, outgoing, carrier, len(blocks) - found.ready
        )
        carrier.open(outgoing)

    def _send_answer(self, session: _Session, lookup: Lookup, answer: Answer) -> None:
        sealed = seal(Kind.ANSWER, session.key, answer)
        self._mailbox.send(lookup.worker_address, lookup.answer_tag, sealed)

    def _ended(self, session: _Session, lookup: Lookup, life: span, outgoing: Outgoing) -> None:
        life.end(blocks=len(outgoing.blocks), sent_bytes=outgoing.sent_bytes)
        del self._open[session.session_id, lookup.sequence]
        self._handler.release(session.session_id, lookup.sequence, outgoing.blocks)
