"""The other end of a rank's pushes, on another GPU: a pool without a model that sends and receives KV on command."""

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait

from bench.kv_push.pools import Geometry, make_pool
from mesh.domain.kv_identity import KvNamespace
from mesh.event_fd import EventFd
from transfer.agent import TransferAgent
from transfer.config import TransferConfig
from transfer.ticket import Ticket
from transfer.tuning import tune_for_gpu_transfers

LANDING_SECONDS = 60.0
# A message that asks for a landing of this many blocks.
Land = int


def run_peer(rank: Connection, gpu: str, geometry: Geometry, namespace: KvNamespace, config: TransferConfig) -> None:
    """Serve until the rank hangs up.

    The rank sends tickets (push there) and numbers of blocks (open a landing). The peer answers with its landings'
    tickets, and reports when a landing or a push has ended.
    """
    news = EventFd()
    tune_for_gpu_transfers()
    agent = TransferAgent(make_pool(gpu, geometry).memory(), namespace, config, time.monotonic, news.set)
    rank.send(None)
    blocks = range(geometry.blocks)
    while True:
        ready = wait([news.fileno(), rank])
        if news.fileno() in ready:
            news.clear()
        for event in agent.events():
            rank.send(event)
        while rank.poll():
            try:
                message: Ticket | Land = rank.recv()
            except EOFError:
                agent.close()
                return
            _obey(agent, message, blocks, rank)


def _obey(agent: TransferAgent, message: Ticket | Land, blocks: Sequence[int], rank: Connection) -> None:
    match message:
        case Ticket():
            # Pushes only read, so that all may use the same blocks.
            held = blocks[: max(each.first_block + each.block_count for each in message.segments)]
            agent.push(message, held)
            agent.ready(message.transfer_id, message.namespace.layers, len(held))
        case int():
            rank.send(agent.open_landing(blocks[:message], 0, 0, LANDING_SECONDS))
