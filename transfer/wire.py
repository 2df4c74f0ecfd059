"""Translates tickets and handles of slabs to protos and back; the only such translation."""

from deepmesh.internal.v1 import kvstore_pb2, landing_pb2

from mesh.domain import worker_wire
from mesh.errors import InvalidRequest
from transfer.shared_memory import MemoryHandle
from transfer.ticket import Segment, SlabHandle, Ticket

TRANSFER_ID_BYTES = 16
SECRET_BYTES = 32
MAX_SEGMENTS = 65_536


def ticket(message: landing_pb2.LandingTicket) -> Ticket:
    """Raises InvalidRequest for a message that cannot be a ticket. `tickets.refusal_of` checks the rest before a
    push.
    """
    if len(message.transfer_id) != TRANSFER_ID_BYTES or len(message.secret) != SECRET_BYTES:
        raise InvalidRequest(
            f"a ticket has {TRANSFER_ID_BYTES} bytes of transfer_id and {SECRET_BYTES} of secret", field="ticket"
        )
    if len(message.segments) > MAX_SEGMENTS:
        raise InvalidRequest(f"a ticket has at most {MAX_SEGMENTS} segments", field="ticket.segments")
    return Ticket(
        transfer_id=message.transfer_id,
        attempt=message.attempt,
        secret=message.secret,
        tag=message.tag,
        deadline_ms=message.deadline_ms,
        namespace=worker_wire.namespace(message.kv_namespace, "ticket.kv_namespace"),
        segments=tuple(_segment(each) for each in message.segments),
    )


def slab(message: kvstore_pb2.MappableSlab) -> SlabHandle:
    size_bytes = message.layers * message.blocks * message.piece_bytes
    memory = MemoryHandle(message.host, message.process_id, message.descriptor, message.name, size_bytes)
    return SlabHandle(memory, message.layers, message.blocks, message.piece_bytes)


def slab_message(handle: SlabHandle) -> kvstore_pb2.MappableSlab:
    memory = handle.memory
    return kvstore_pb2.MappableSlab(
        host=memory.host,
        name=memory.name,
        process_id=memory.process_id,
        descriptor=memory.descriptor,
        layers=handle.layers,
        blocks=handle.blocks,
        piece_bytes=handle.piece_bytes,
    )


def ticket_message(ticket: Ticket) -> landing_pb2.LandingTicket:
    return landing_pb2.LandingTicket(
        transfer_id=ticket.transfer_id,
        attempt=ticket.attempt,
        secret=ticket.secret,
        tag=ticket.tag,
        deadline_ms=ticket.deadline_ms,
        kv_namespace=worker_wire.namespace_message(ticket.namespace),
        segments=[_segment_message(each) for each in ticket.segments],
    )


def _segment(message: landing_pb2.LandingSegment) -> Segment:
    return Segment(
        index=message.index,
        destination_rank=message.destination_rank,
        worker_address=message.worker_address,
        first_layer=message.first_layer,
        layer_count=message.layer_count,
        first_block=message.first_block,
        block_count=message.block_count,
        size_bytes=message.size_bytes,
    )


def _segment_message(segment: Segment) -> landing_pb2.LandingSegment:
    return landing_pb2.LandingSegment(
        index=segment.index,
        destination_rank=segment.destination_rank,
        worker_address=segment.worker_address,
        first_layer=segment.first_layer,
        layer_count=segment.layer_count,
        first_block=segment.first_block,
        block_count=segment.block_count,
        size_bytes=segment.size_bytes,
    )
