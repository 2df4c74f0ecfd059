"""Batches of KV events as protos."""

from deepmesh.v1 import kv_events_pb2

from mesh.blocks import BLOCK_TOKENS
from mesh.domain.workers import WorkerIdentity
from worker.events.batch import Batch, Event, Removed, Stored


def batch_message(batch: Batch, worker: WorkerIdentity) -> kv_events_pb2.SubscribeResponse:
    response = kv_events_pb2.SubscribeResponse(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        model=worker.model,
        sequence=batch.sequence,
        data_parallel_rank=batch.rank,
        events=map(_event_message, batch.events),
        snapshot=batch.snapshot,
        more=batch.more,
    )
    response.time.FromNanoseconds(int(batch.seconds * 1e9))
    return response


def _event_message(event: Event) -> kv_events_pb2.KvEvent:
    if isinstance(event, Stored):
        stored = kv_events_pb2.BlockStored(
            block_hashes=event.hashes,
            parent_block_hash=event.parent,
            token_ids=memoryview(event.tokens).cast("I"),
            block_size=BLOCK_TOKENS,
            medium=event.medium,
            cache_root=event.root,
        )
        return kv_events_pb2.KvEvent(block_stored=stored)
    if isinstance(event, Removed):
        removed = kv_events_pb2.BlockRemoved(block_hashes=event.hashes, medium=event.medium)
        return kv_events_pb2.KvEvent(block_removed=removed)
    return kv_events_pb2.KvEvent(all_blocks_cleared=kv_events_pb2.AllBlocksCleared())
