"""The ranks of a TP group compute the same batches over the same KV: the others follow the first.

Only the first has an engine and moves KV. What lands in its pool is copied to the others before a batch can read it.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from engine.batch import Batch, Row
from engine.exchange.interface import RankExchange
from engine.moves.host_slots import HostSlots
from engine.parallel.layout import Group
from engine.runner.block_copies import copy_blocks
from kernels.host_copy import to_indices
from kernels.kv_copy.words import as_words
from transfer.memory import Check, Done, HostSource, KeyedPieces, KvMemory, Pending, Pool
from transfer.segments import Tile

_FIRST = 0


class LandedKv(msgspec.Struct, frozen=True, array_like=True):
    """Pieces of the pool that were written from outside."""

    first_layer: int
    layer_count: int
    blocks: Sequence[int]


class FirstBatch(msgspec.Struct, frozen=True, array_like=True):
    """What the first rank tells the others at each launch."""

    step: int
    # Without histories and masks: only the first rank draws.
    rows: Sequence[Row]
    landed: Sequence[LandedKv]


class Following:
    """One rank's end. Every rank of the group calls `next_batch` once for each launch."""

    def __init__(self, exchange: RankExchange, planes: Sequence[torch.Tensor]) -> None:
        """planes: those of `DeviceState`, with the same number of blocks on all ranks of the group, and a multiple of 8
        bytes of a block in a layer.
        """
        self._exchange = exchange
        self._planes = as_words(planes)
        self._leads = exchange.place.leads
        self._landings: deque[tuple[LandedKv, Pending[object]]] = deque()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=list)
        self._decoder = msgspec.msgpack.Decoder(FirstBatch)

    def watched(self, memory: KvMemory) -> KvMemory:
        """The first rank's pool as transfers see it: what they write is copied to the other ranks."""
        return _WatchedMemory(memory, self._landings)

    def watched_slots(self, slots: HostSlots) -> HostSlots:
        """The first rank's host memory: what is read back from there is copied to the other ranks."""
        return _WatchedSlots(slots, len(self._planes[0]), self._landings)

    def wrote(self, first_layer: int, layer_count: int, block_ids: Sequence[int]) -> None:
        """Note pieces that the first rank wrote itself, outside a batch."""
        self._landings.append((LandedKv(first_layer, layer_count, list(block_ids)), Done(True)))

    def next_batch(self, batch: Batch) -> Batch:
        """The first rank's batch, on every rank; the others pass dummies. Before that, copies what has landed."""
        if self._leads:
            first = FirstBatch(batch.step, [_to_compute(row) for row in batch.rows], self._drain_landed())
            self._broadcast_bytes(self._encoder.encode(first))
        else:
            first = self._decoder.decode(self._broadcast_bytes(b""))
            batch = Batch(first.step, first.rows)
        for landed in first.landed:
            self._copy(landed)
        return batch

    def _drain_landed(self) -> list[LandedKv]:
        """Pieces of KV that have landed since the last batch. Those still being copied follow with a later batch."""
        landed = []
        for _ in range(len(self._landings)):
            piece, pending = self._landings.popleft()
            if pending.completed:
                landed.append(piece)
            else:
                self._landings.append((piece, pending))
        return landed

    def _copy(self, landed: LandedKv) -> None:
        layers = slice(landed.first_layer, landed.first_layer + landed.layer_count)
        blocks = to_indices(landed.blocks, self._planes[0].device)
        written = [plane[layers] for plane in self._planes]
        copy_blocks(self._exchange, written, blocks, Group.TP, _FIRST, sends=self._leads)

    def _broadcast_bytes(self, data: bytes) -> bytes:
        """The first rank's data, on every rank."""
        size = int(self._exchange.broadcast(torch.tensor([len(data)]), Group.TP, _FIRST))
        given = torch.frombuffer(bytearray(data or size), dtype=torch.uint8)
        return self._exchange.broadcast(given, Group.TP, _FIRST).numpy().tobytes()


def _to_compute(row: Row) -> Row:
    """The row without what only its draw needs."""
    drawn_by_more = row.history is not None or row.masks is not None
    return msgspec.structs.replace(row, history=None, masks=None) if drawn_by_more else row


class _WatchedMemory:
    """A KvMemory that notes what is written to it, by the transfer thread. The other attributes are read once, before
    that thread starts.
    """

    def __init__(self, memory: KvMemory, landings: deque[tuple[LandedKv, Pending[object]]]) -> None:
        self._memory = memory
        self._landings = landings
        self.layers, self.blocks, self.piece_bytes = memory.layers, memory.blocks, memory.piece_bytes
        self.is_on_gpu = memory.is_on_gpu

    def allocate_staging(self, size_bytes: int) -> Any:
        return self._memory.allocate_staging(size_bytes)

    def enter_thread(self) -> None:
        self._memory.enter_thread()

    def host_side(self, staging: Any) -> Any:
        return self._memory.host_side(staging)

    def received(self, staging: Any, size_bytes: int) -> None:
        self._memory.received(staging, size_bytes)

    def tags(self, staging: Any, tile: Tile, keyed: Sequence[KeyedPieces]) -> list[bytes]:
        return self._memory.tags(staging, tile, keyed)

    def host_source(self, mapped: Pool) -> HostSource:
        return _WatchedSource(self._memory.host_source(mapped), self._landings)

    def prepare(self, key: bytes) -> None:
        self._memory.prepare(key)

    def gather(
        self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Any, key: bytes
    ) -> Pending[bytes]:
        return self._memory.gather(first_layer, layer_count, blocks, staging, key)

    def land(
        self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Any, key: bytes, checksum: bytes
    ) -> Pending[bool]:
        pending = self._memory.land(first_layer, layer_count, blocks, staging, key, checksum)
        self._landings.append((LandedKv(first_layer, layer_count, list(blocks)), pending))
        return pending


class _WatchedSource:
    """A HostSource that notes which blocks it writes to."""

    def __init__(self, source: HostSource, landings: deque[tuple[LandedKv, Pending[object]]]) -> None:
        self._source = source
        self._landings = landings

    def copy(
        self, tile: Tile, sources: Sequence[int], blocks: Sequence[int], check: Check | None = None
    ) -> Pending[str | None]:
        # What is refused is read by no batch.
        copied = self._source.copy(tile, sources, blocks, check)
        self._landings.append((LandedKv(tile.first_layer, tile.layer_count, list(blocks)), copied))
        return copied


class _WatchedSlots:
    """Slots that note which blocks they write to."""

    def __init__(self, slots: HostSlots, layers: int, landings: deque[tuple[LandedKv, Pending[object]]]) -> None:
        self._slots = slots
        self._layers = layers
        self._landings = landings
        self.completes_later = slots.completes_later

    @property
    def count(self) -> int:
        return self._slots.count

    def write(self, blocks: Sequence[int], slots: Sequence[int]) -> Pending[None]:
        return self._slots.write(blocks, slots)

    def read(self, slots: Sequence[int], blocks: Sequence[int]) -> Pending[float]:
        pending = self._slots.read(slots, blocks)
        self._landings.append((LandedKv(0, self._layers, list(blocks)), pending))
        return pending
