"""Follows the KV blocks of one worker, as a router outside the mesh does:

    python examples/python/kv_events.py 127.0.0.1:8010 [--batches 10]

The worker needs kv_events.enabled=true. Each event is printed as one line of JSON, with the names that vLLM gives its
fields. After a break it goes on where it stopped, or is told all blocks again. Needs the stubs: pip install ./protos
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import grpc
from deepmesh.v1 import kv_events_pb2, kv_events_pb2_grpc

RETRY_SECONDS = 1.0


class Index:
    """Which blocks the worker holds, by rank and medium."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, str], set[bytes]] = {}
        self._incarnation, self._following = "", 0

    @property
    def request(self) -> kv_events_pb2.SubscribeRequest:
        return kv_events_pb2.SubscribeRequest(incarnation=self._incarnation, from_sequence=self._following)

    def apply(self, batch: kv_events_pb2.SubscribeResponse) -> Iterator[dict[str, Any]]:
        """Yields each event of the batch as plain values."""
        for event in batch.events:
            yield self._apply(batch.data_parallel_rank, event)
        # A snapshot that was cut off begins again.
        self._incarnation, self._following = batch.incarnation, 0 if batch.more else batch.sequence + 1

    def _apply(self, rank: int, event: kv_events_pb2.KvEvent) -> dict[str, Any]:
        if event.HasField("block_stored"):
            stored = event.block_stored
            self.held.setdefault((rank, stored.medium), set()).update(stored.block_hashes)
            return {
                "type": "BlockStored",
                "block_hashes": [content.hex() for content in stored.block_hashes],
                "parent_block_hash": stored.parent_block_hash.hex() or None,
                "token_ids": list(stored.token_ids),
                "block_size": stored.block_size,
                "medium": stored.medium,
            }
        if event.HasField("block_removed"):
            removed = event.block_removed
            self.held.setdefault((rank, removed.medium), set()).difference_update(removed.block_hashes)
            contents = [content.hex() for content in removed.block_hashes]
            return {"type": "BlockRemoved", "block_hashes": contents, "medium": removed.medium}
        self.held.clear()
        return {"type": "AllBlocksCleared"}


def batches(endpoint: str, index: Index) -> Iterator[kv_events_pb2.SubscribeResponse]:
    """Batches of a worker, without end; each is for the index to apply. After a break they go on where that is."""
    with grpc.insecure_channel(endpoint) as channel:
        stub = kv_events_pb2_grpc.KvEventsServiceStub(channel)
        while True:
            try:
                yield from stub.Subscribe(index.request)
            except grpc.RpcError as error:
                sys.stderr.write(f"{error.code().name}: {error.details()}\n")
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    sys.exit(1)
                time.sleep(RETRY_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint", help="host:port of a prefill or decode worker")
    parser.add_argument("--batches", type=int, help="end after this many; by default never")
    arguments = parser.parse_args()
    index = Index()
    for read, batch in enumerate(batches(arguments.endpoint, index), 1):
        for event in index.apply(batch):
            line = {"worker": batch.worker_id, "rank": batch.data_parallel_rank, "sequence": batch.sequence}
            sys.stdout.write(json.dumps(line | event) + "\n")
        sys.stdout.flush()
        if read == arguments.batches:
            return


if __name__ == "__main__":
    main()
