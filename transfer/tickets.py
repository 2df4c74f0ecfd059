"""Tickets: how a receiver makes one, and which ones a sender refuses."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from mesh.domain.kv_identity import KvNamespace
from mesh.errors import InvalidRequest, MeshError, NamespaceMismatch
from transfer.segments import Tile, covers_once, tile_of
from transfer.tags import are_landing_tags, draw_tags, landing_tags
from transfer.ticket import Segment, Ticket

# Why a ticket was refused; keys of TransferCounters.refused.
EXPIRED_TICKET = "expired_ticket"
REPLAYED_TICKET = "replayed_ticket"
OTHER_NAMESPACE = "other_namespace"
OVERSIZED_SEGMENT_LIST = "oversized_segment_list"
WRONG_SIZE = "wrong_size"
RESERVED_TAG = "reserved_tag"


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of the sender's KV, and the size of its slots."""

    layers: int
    piece_bytes: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class TicketRefusal:
    reason: str
    error: MeshError


def make_ticket(
    tiles: Sequence[Tile],
    piece_bytes: int,
    namespace: KvNamespace,
    rank: int,
    worker_address: bytes,
    attempt: int,
    deadline_seconds: float,
) -> Ticket:
    """A new landing's ticket. Transfer id, secret and tag are drawn at random and never used again.

    `rank`: number of the receiving rank in its worker; `worker_address`: its UCX address.
    """
    return Ticket(
        transfer_id=secrets.token_bytes(16),
        attempt=attempt,
        secret=secrets.token_bytes(32),
        tag=draw_tags(landing_tags(len(tiles))),
        deadline_ms=int(deadline_seconds * 1000),
        namespace=namespace,
        segments=tuple(
            Segment(index, rank, worker_address, *tile, tile.pieces * piece_bytes) for index, tile in enumerate(tiles)
        ),
    )


def refusal_of(ticket: Ticket, blocks: int, namespace: KvNamespace, geometry: Geometry) -> TicketRefusal | None:
    """Why `blocks` blocks cannot be pushed with this ticket; None if they can."""
    if not namespace.provides(ticket.namespace):
        message = f"the landing is for KV of {ticket.namespace}, this worker's is {namespace}"
        return TicketRefusal(OTHER_NAMESPACE, NamespaceMismatch(message))
    if ticket.deadline_ms <= 0:
        return _refuse(EXPIRED_TICKET, "the ticket has expired")
    # A segment has at least one piece.
    if len(ticket.segments) > geometry.layers * blocks:
        return _refuse(OVERSIZED_SEGMENT_LIST, f"{len(ticket.segments)} segments are too many for {blocks} blocks")
    if not are_landing_tags(ticket.tag, len(ticket.segments)):
        return _refuse(RESERVED_TAG, "the ticket's tags are not a landing's")
    for index, segment in enumerate(ticket.segments):
        if not _is_sound(segment, index, geometry):
            return _refuse(WRONG_SIZE, f"segment {index} of the ticket is not one that this worker can send")
    layers = ticket.namespace.layers
    if not covers_once([tile_of(segment) for segment in ticket.segments], layers, blocks):
        return _refuse(WRONG_SIZE, f"the ticket's segments are not {layers} layers of {blocks} blocks")
    largest = max((segment.size_bytes for segment in ticket.segments), default=0)
    if largest > geometry.slot_bytes:
        slots = f"transfer.slot_bytes of this worker is {geometry.slot_bytes}: raise it to {largest} or more"
        return _refuse(WRONG_SIZE, f"the landing has segments of {largest} bytes, and {slots}")
    return None


def _is_sound(segment: Segment, index: int, geometry: Geometry) -> bool:
    return (
        segment.index == index
        and segment.first_layer >= 0
        and segment.layer_count > 0
        and segment.first_block >= 0
        and segment.block_count > 0
        and segment.size_bytes == segment.layer_count * segment.block_count * geometry.piece_bytes
    )


def _refuse(reason: str, message: str) -> TicketRefusal:
    return TicketRefusal(reason, InvalidRequest(message, field="ticket"))
