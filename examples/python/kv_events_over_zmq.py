"""Publishes the KV events of one worker as vLLM's engines publish theirs, for routers that read those:

    python examples/python/kv_events_over_zmq.py 127.0.0.1:8010 [--publish tcp://*:5557] [--replay tcp://*:5558]
    [--topic kv@POD@MODEL]

As with vLLM, an address with * is one to listen at; any other is that of a reader which listens itself, as llm-d's
does. That one needs the topic too, and a blockSize of 64. A reader that missed batches asks for them at the second
address, by the number of the first. If that one is no longer kept, all readers are told all blocks again. `make
check-dynamo` has Dynamo's indexer read it. Needs the stubs and two packages: pip install ./protos msgspec pyzmq
"""

import argparse
import threading
from collections import deque
from typing import Any

import msgspec
import zmq
from kv_events import Index, batches

# Batches that can be asked for again.
KEPT_BATCHES = 10_000
ALL_BLOCKS_CLEARED = "AllBlocksCleared"
# As vLLM ends an answer of its replay socket.
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """vLLM's two sockets: each message has a number and a batch in msgpack."""

    def __init__(self, publish: str, replay: str, topic: str) -> None:
        context = zmq.Context.instance()
        self._out, self._asked = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        if "*" in publish:
            self._out.bind(publish)
        else:
            self._out.connect(publish)
        self._asked.bind(replay)
        self._topic = topic.encode()
        self._next = 0
        self._ranks = {0}
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)
        # Set when a reader has asked for a batch that is no longer kept.
        self.lacking = threading.Event()
        threading.Thread(target=self._replay_forever, daemon=True).start()

    def publish(self, seconds: float, events: list[list[Any]], rank: int) -> None:
        self._ranks.add(rank)
        # To readers a batch is of one rank.
        for each in self._ranks if [ALL_BLOCKS_CLEARED] in events else {rank}:
            self._publish(seconds, events, each)

    def _publish(self, seconds: float, events: list[list[Any]], rank: int) -> None:
        number, self._next = self._next, self._next + 1
        packed = msgspec.msgpack.encode([seconds, events, rank])
        self._kept.append((number, packed))
        self._out.send_multipart((self._topic, number.to_bytes(8, "big"), packed))

    def _replay_forever(self) -> None:
        while True:
            reader, *_, first = self._asked.recv_multipart()
            kept = list(self._kept)
            if kept and int.from_bytes(first, "big") < kept[0][0]:
                self.lacking.set()
            for number, packed in kept:
                if number >= int.from_bytes(first, "big"):
                    self._asked.send_multipart((reader, b"", number.to_bytes(8, "big"), packed))
            self._asked.send_multipart((reader, b"", END_OF_REPLAY, b""))


def in_vllms_order(event: dict[str, Any]) -> list[Any]:
    """An event's type and fields as vLLM's msgpack has them; hashes become numbers of 64 bits."""

    def number(content: str) -> int:
        return int(content[:16], 16)

    contents = [number(each) for each in event.get("block_hashes", ())]
    if event["type"] == "BlockStored":
        parent, lora_id = event["parent_block_hash"], None
        before = None if parent is None else number(parent)
        return [event["type"], contents, before, event["token_ids"], event["block_size"], lora_id, event["medium"]]
    return [event["type"], contents, event["medium"]] if event["type"] == "BlockRemoved" else [event["type"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint", help="host:port of a prefill or decode worker")
    parser.add_argument("--publish", default="tcp://*:5557", help="where batches are published, or who listens")
    parser.add_argument("--replay", default="tcp://*:5558", help="where missed ones are asked for")
    parser.add_argument("--topic", default="", help="of each message")
    arguments = parser.parse_args()
    publisher = Publisher(arguments.publish, arguments.replay, arguments.topic)
    while True:
        index = Index()
        for batch in batches(arguments.endpoint, index):
            events = [in_vllms_order(event) for event in index.apply(batch)]
            publisher.publish(batch.time.ToMicroseconds() / 1e6, events, batch.data_parallel_rank)
            if publisher.lacking.is_set():
                publisher.lacking.clear()
                break


if __name__ == "__main__":
    main()
