"""How long the transfer thread looks on: policy of the exchange, without a thread."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from mesh.domain.kv_identity import KvNamespace
from tests.support.fake_transport import FakeTransport
from tests.support.transfer_peer import KnownChains
from transfer.config import TransferConfig
from transfer.exchange import Exchange
from transfer.fetch.lookup import Lookup, session_message
from transfer.fetch.lookup_server import Found
from transfer.host_memory import HostMemory
from transfer.seal import Kind
from transfer.segments import plan_whole
from transfer.tags import LOOKUP_TAG
from transfer.tally import Tally
from transfer.ticket import Ticket
from transfer.tickets import make_ticket
from transfer.transport import Arrival

LAYERS, BLOCKS, PIECE = 2, 4, 64
NAMESPACE = KvNamespace(weights_fingerprint="test", dtype="bfloat16", layers=LAYERS, layout="test")


class GpuMemory(HostMemory):
    """Taken for a GPU's."""

    is_on_gpu = True


class Reason(str):
    """Calls `meanwhile` when somebody looks it up, as a reader does in the middle of an iteration."""

    __slots__ = ("meanwhile",)
    meanwhile: Callable[[], object] | None

    def __hash__(self) -> int:
        meanwhile = getattr(self, "meanwhile", None)
        self.meanwhile = None
        if meanwhile is not None:
            meanwhile()
        return super().__hash__()


def exchange_over(memory: type[HostMemory], refused: Tally | None = None) -> Exchange:
    array = np.zeros((LAYERS, BLOCKS, PIECE), np.uint8)
    transport, refused = FakeTransport(), refused or Tally()
    return Exchange(transport, memory(array), TransferConfig(), lambda: 0.0, lambda _: None, refused, None, None)


def ticket_of(blocks: int) -> Ticket:
    tiles = plan_whole(LAYERS, blocks, PIECE, 1 << 16)
    return make_ticket(tiles, PIECE, NAMESPACE, 0, b"there", attempt=0, deadline_seconds=10.0)


@pytest.mark.parametrize("begin", [Exchange.open_landing, Exchange.push])
def test_with_gpu_memory_it_polls_while_a_transfer_is_open(
    begin: Callable[[Exchange, Ticket, Sequence[int]], None],
) -> None:
    exchange, ticket = exchange_over(GpuMemory), ticket_of(BLOCKS)
    assert exchange.busy_poll_seconds == 0
    begin(exchange, ticket, range(BLOCKS))
    assert exchange.busy_poll_seconds > 0.1
    exchange.cancel_landing(ticket.transfer_id)
    exchange.cancel_push(ticket.transfer_id)
    assert exchange.busy_poll_seconds == 0


class ReadLater(KnownChains):
    """Its blocks are not in memory yet."""

    def match(self, session_id: int, sequence: int, hashes: Sequence[bytes]) -> Found:
        return super().match(session_id, sequence, hashes)._replace(ready=0)


def test_a_store_whose_disk_is_read_does_not_poll() -> None:
    transport, chain, key = FakeTransport(), [bytes([number]) * 16 for number in range(BLOCKS)], bytes(32)
    memory = HostMemory(np.zeros((LAYERS, BLOCKS, PIECE), np.uint8))
    handler, refused = ReadLater(chain, range(BLOCKS)), Tally()
    store = Exchange(transport, memory, TransferConfig(), lambda: 0.0, lambda _: None, refused, handler, None)
    assert store.server is not None and store.busy_poll_seconds > 0
    store.server.open_session(1, key)
    lookup = Lookup(1, 1000, b"there", 100, 1 << 16, LAYERS, PIECE, b"".join(chain), mapped=True)
    message = session_message(Kind.LOOKUP, 1, key, lookup)
    transport.arrivals.append(Arrival(LOOKUP_TAG, len(message), message))
    store.poll()
    transport.finish_messages(LOOKUP_TAG)
    store.poll()
    assert store.server.open == 1 and store.busy_poll_seconds == 0
    store.server.blocks_read(1, 1, BLOCKS - 1, False)
    assert store.busy_poll_seconds == 0
    store.server.blocks_read(1, 1, BLOCKS, False)
    assert store.busy_poll_seconds > 0


def test_with_host_memory_it_polls_only_while_bytes_move() -> None:
    exchange, ticket = exchange_over(HostMemory), ticket_of(BLOCKS)
    exchange.push(ticket, range(BLOCKS))
    exchange.poll()
    assert exchange.busy_poll_seconds == 0
    exchange.ready(ticket.transfer_id, LAYERS, BLOCKS)
    exchange.poll()
    assert 0 < exchange.busy_poll_seconds < 0.1


def test_counters_can_be_read_during_the_first_refusal() -> None:
    refused, first = Tally(), Reason("first")
    exchange = exchange_over(HostMemory, refused)
    refused.add(first)
    first.meanwhile = lambda: refused.add("second")
    assert "first" in exchange.counters().refused
