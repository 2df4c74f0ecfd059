"""The messages of KvStoreService, in and out: checked, bounded, and translated to the store's own types."""

from collections.abc import Sequence

from deepmesh.internal.v1 import kvstore_pb2

from kvstore.center import StoreAttachment, StoreStatus
from kvstore.index import Location
from kvstore.offers import OfferAnswer
from mesh.blocks import HASH_BYTES
from mesh.domain import worker_wire
from mesh.domain.shares import TENANT_TAG_BYTES
from mesh.errors import InvalidRequest
from transfer import wire as transfer_wire

# Enough for a million tokens.
MAX_CHAIN_BLOCKS = 16_384


def chain(hashes: Sequence[bytes], field: str) -> list[bytes]:
    """Raises InvalidRequest if the chain is too long, or has an entry that is not a block's hash."""
    if len(hashes) > MAX_CHAIN_BLOCKS:
        raise InvalidRequest(f"{len(hashes)} block hashes: at most {MAX_CHAIN_BLOCKS}", field=field)
    if any(len(block_hash) != HASH_BYTES for block_hash in hashes):
        raise InvalidRequest(f"a block hash is {HASH_BYTES} bytes", field=field)
    return list(hashes)


def parent(block_hash: bytes) -> bytes:
    """The hash before the first block of a chain; empty if that is the root. Raises InvalidRequest."""
    if block_hash and len(block_hash) != HASH_BYTES:
        raise InvalidRequest(f"a block hash is {HASH_BYTES} bytes", field="parent_hash")
    return block_hash


def tenant(tag: bytes) -> bytes:
    """A tenant's tag; empty for no tenant. Raises InvalidRequest."""
    if tag and len(tag) != TENANT_TAG_BYTES:
        raise InvalidRequest(f"a tenant's tag is {TENANT_TAG_BYTES} bytes", field="tenant")
    return tag


def attach_response(attachment: StoreAttachment, store_id: str, epoch: str) -> kvstore_pb2.AttachWorkerResponse:
    session = attachment.session
    response = kvstore_pb2.AttachWorkerResponse(
        store_id=store_id,
        epoch=epoch,
        worker_address=attachment.worker_address,
        session_id=session.session_id,
        session_key=session.key,
    )
    if attachment.slab is not None:
        response.slab.CopyFrom(transfer_wire.slab_message(attachment.slab))
    response.lease.FromMilliseconds(int(attachment.lease_seconds * 1000))
    return response


def match_response(location: Location | None, disk_blocks: int) -> kvstore_pb2.MatchPrefixResponse:
    if location is None:
        return kvstore_pb2.MatchPrefixResponse()
    return kvstore_pb2.MatchPrefixResponse(
        blocks=location.blocks, epoch=location.epoch, store_id=location.store_id, disk_blocks=disk_blocks
    )


def offer_response(answer: OfferAnswer) -> kvstore_pb2.OfferResponse:
    return kvstore_pb2.OfferResponse(
        ticket=transfer_wire.ticket_message(answer.ticket) if answer.ticket else None,
        wanted=answer.wanted,
        parent_missing=answer.parent_missing,
    )


def status_response(status: StoreStatus, store_id: str, epoch: str) -> kvstore_pb2.GetStatusResponse:
    memory = kvstore_pb2.TierStatus(
        name="memory",
        total_blocks=status.total_blocks,
        used_blocks=status.used_blocks,
        block_bytes=status.block_bytes,
    )
    tiers = [memory]
    if status.disk_blocks is not None:
        tiers.append(
            kvstore_pb2.TierStatus(
                name="disk",
                total_blocks=status.disk_blocks,
                used_blocks=status.used_disk_blocks,
                block_bytes=status.block_bytes,
            )
        )
    return kvstore_pb2.GetStatusResponse(
        store_id=store_id,
        epoch=epoch,
        tiers=tiers,
        lookups=status.lookups,
        hits=status.hits,
        attached_workers=status.attached_workers,
        transfers=worker_wire.transfers_message(status.transfers),
    )
