"""Transfer agents without UCX. Bytes move between memories of one process, at times and in an order that a test
sets.
"""

import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from mesh.domain.kv_identity import KvNamespace
from mesh.domain.workers import TransferCounters
from mesh.errors import InvalidRequest, NamespaceMismatch
from mesh.observe.tracing import TraceContext
from transfer.checksum import segment_checksum
from transfer.events import Event, Fetched, Landed, LandingFailed, PushEnded
from transfer.memory import KvMemory
from transfer.push import PushState
from transfer.segments import plan_layerwise, plan_whole, tile_of
from transfer.ticket import Segment, StoreSession, Ticket


class Fabric:
    """The open transfers between agents. `run_one` lets one of them, drawn at random, make progress."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.agents: list[FakeAgent] = []
        # The probability that a landing, a push or a fetch fails on its way.
        self.failure_probability = 0.0
        # The store's content by hash: pieces of all layers, or of the base layers alone.
        self.stored: dict[bytes, bytes] = {}
        self._under_way: list[Callable[[], None]] = []

    def later(self, action: Callable[[], None]) -> None:
        self._under_way.append(action)

    def fails(self) -> bool:
        return self.rng.random() < self.failure_probability

    def run_one(self) -> bool:
        """Let one thing happen. Returns False if nothing is open."""
        if not self._under_way:
            return False
        self._under_way.pop(self.rng.randrange(len(self._under_way)))()
        return True

    def landing(self, transfer_id: bytes) -> "tuple[FakeAgent, _Landing] | None":
        for agent in self.agents:
            if transfer_id in agent.landings:
                return agent, agent.landings[transfer_id]
        return None


@dataclass
class _Landing:
    blocks: Sequence[int]
    ticket: Ticket
    landed: set[int] = field(default_factory=set)


@dataclass
class _Outgoing:
    ticket: Ticket
    blocks: Sequence[int]
    state: PushState


class FakeAgent:
    """Stands in for `transfer.agent.TransferAgent` under an engine. It copies bytes as late as it is allowed to."""

    def __init__(
        self, memory: KvMemory, namespace: KvNamespace, fabric: Fabric, layerwise_tokens: int = 1 << 30
    ) -> None:
        self.memory = memory
        self.namespace = namespace
        self.fabric = fabric
        self.landings: dict[bytes, _Landing] = {}
        self.pushes: dict[bytes, _Outgoing] = {}
        self.fetches: set[int] = set()
        self.sessions: dict[str, StoreSession] = {}
        # All calls of `ready`, in order: (transfer, layers, blocks).
        self.ready_calls: list[tuple[bytes, int, int]] = []
        self._layerwise_tokens = layerwise_tokens
        self._events: list[Event] = []
        fabric.agents.append(self)

    address = b"fake"

    def events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def counters(self) -> TransferCounters:
        return TransferCounters(len(self.landings), len(self.pushes), len(self.fetches))

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def open_landing(
        self,
        blocks: Sequence[int],
        tokens: int,
        attempt: int,
        deadline_seconds: float,
        sender_slot_bytes: int | None,
        with_drafts: bool,
    ) -> Ticket:
        plan = plan_layerwise if tokens >= self._layerwise_tokens else plan_whole
        namespace = self.namespace if with_drafts else self.namespace.base
        layers, piece_bytes = namespace.layers, self.memory.piece_bytes
        # A segment has two blocks of all layers.
        tiles = plan(layers, len(blocks), piece_bytes, 2 * layers * piece_bytes)
        segments = tuple(
            Segment(index, 0, self.address, *tile, tile.pieces * piece_bytes) for index, tile in enumerate(tiles)
        )
        deadline_ms = int(deadline_seconds * 1000)
        ticket = Ticket(secrets.token_bytes(16), attempt, bytes(32), 1, deadline_ms, namespace, segments)
        self.landings[ticket.transfer_id] = _Landing(list(blocks), ticket)
        if self.fabric.fails():
            self.fabric.later(lambda: self._fail(ticket.transfer_id, "it failed"))
        return ticket

    def cancel_landing(self, transfer_id: bytes) -> None:
        self.fabric.later(lambda: self._fail(transfer_id, "it was cancelled"))

    def push(self, ticket: Ticket, blocks: Sequence[int], offered: Sequence[bytes] | None = None) -> None:
        if not self.namespace.provides(ticket.namespace):
            raise NamespaceMismatch("the landing is for other KV")
        if ticket.size_bytes != len(blocks) * ticket.namespace.layers * self.memory.piece_bytes:
            raise InvalidRequest("the ticket does not fit the blocks", field="ticket")
        assert ticket.transfer_id not in self.pushes
        state = PushState([tile_of(segment) for segment in ticket.segments], deadline=0.0)
        self.pushes[ticket.transfer_id] = _Outgoing(ticket, list(blocks), state)
        if self.fabric.fails():
            self.fabric.later(lambda: self._fail_push(ticket.transfer_id, "it failed"))

    def ready(self, transfer_id: bytes, layers: int, blocks: int) -> None:
        self.ready_calls.append((transfer_id, layers, blocks))
        if transfer_id in self.pushes:
            assert blocks <= len(self.pushes[transfer_id].blocks)
            self.pushes[transfer_id].state.computed(layers, blocks)
            self._send(transfer_id)

    def cancel_push(self, transfer_id: bytes) -> None:
        self.fabric.later(lambda: self._fail_push(transfer_id, "it was cancelled"))

    def attach_store(self, session: StoreSession) -> None:
        self.sessions[session.store_id] = session

    def detach_store(self, store_id: str) -> None:
        self.sessions.pop(store_id, None)

    def fetch(
        self,
        fetch_id: int,
        store_id: str,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        span: TraceContext | None = None,
    ) -> None:
        assert len(hashes) == len(blocks)
        self.fetches.add(fetch_id)
        self.fabric.later(lambda: self._answer(fetch_id, list(hashes), list(blocks)))

    def _fail(self, transfer_id: bytes, why: str) -> None:
        if self.landings.pop(transfer_id, None) is not None:
            self.emit(LandingFailed(transfer_id, "DEADLINE_EXCEEDED", why))

    def _fail_push(self, transfer_id: bytes, why: str) -> None:
        if transfer_id in self.pushes:
            self.pushes[transfer_id].state.fail(why)
            self._end_push(transfer_id)

    def _send(self, transfer_id: bytes) -> None:
        state = self.pushes[transfer_id].state
        while (index := state.next_segment()) is not None:
            state.begin(index)
            self.fabric.later(partial(self._deliver, transfer_id, index))

    def _deliver(self, transfer_id: bytes, index: int) -> None:
        outgoing = self.pushes[transfer_id]
        outgoing.state.sent(index)
        if outgoing.state.error is None:
            content = self._gather(outgoing, index)
            self.fabric.later(lambda: self._land(transfer_id, index, content))
        self._end_push(transfer_id)

    def _gather(self, outgoing: _Outgoing, index: int) -> Any:
        segment = outgoing.ticket.segments[index]
        content = np.zeros(segment.size_bytes, np.uint8)
        blocks = outgoing.blocks[segment.first_block : segment.first_block + segment.block_count]
        self.memory.gather(segment.first_layer, segment.layer_count, blocks, content, b"")
        return content

    def _end_push(self, transfer_id: bytes) -> None:
        state = self.pushes[transfer_id].state
        if state.ended and not state.in_flight:
            size = self.pushes.pop(transfer_id).ticket.size_bytes
            self.emit(PushEnded(transfer_id, size, "fake", state.error))

    def _land(self, transfer_id: bytes, index: int, content: Any) -> None:
        if (found := self.fabric.landing(transfer_id)) is not None:
            receiver, landing = found
            segment = landing.ticket.segments[index]
            blocks = landing.blocks[segment.first_block : segment.first_block + segment.block_count]
            write(receiver.memory, segment.first_layer, segment.layer_count, blocks, content)
            landing.landed.add(index)
            if len(landing.landed) == len(landing.ticket.segments):
                del receiver.landings[transfer_id]
                receiver.emit(Landed(transfer_id, landing.ticket.size_bytes, "fake"))

    def _answer(self, fetch_id: int, hashes: list[bytes], blocks: list[int]) -> None:
        self.fetches.remove(fetch_id)
        found, drafted = 0, 0
        for content, block in zip(hashes, blocks, strict=True):
            if content not in self.fabric.stored or self.fabric.fails():
                break
            pieces = np.frombuffer(self.fabric.stored[content], np.uint8)
            layers = len(pieces) // self.memory.piece_bytes
            write(self.memory, 0, layers, [block], pieces)
            drafted += found == drafted and layers == self.memory.layers
            found += 1
        self.emit(Fetched(fetch_id, found, 0, 0.0, drafted=drafted))


def write(memory: KvMemory, first_layer: int, layers: int, blocks: Sequence[int], content: Any) -> None:
    memory.land(first_layer, layers, blocks, content, b"", segment_checksum(content, len(content), b""))
