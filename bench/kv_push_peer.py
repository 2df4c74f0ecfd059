"""The other end of a rank's pushes, on another GPU: a pool without a model, that sends and receives as it is told."""

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait

from bench.kv_push_pools import Geometry, make_pool
from mesh.workers import KvNamespace
from transfer.agent import TransferAgent
from transfer.alarm import Alarm
from transfer.config import TransferConfig
from transfer.events import Granted, Landed, LandingFailed, PushEnded, SegmentSent
from transfer.ticket import SegmentDigest, Ticket

LANDING_SECONDS = 60.0
# Says that landings are to be opened for this many blocks.
Land = int


def run_peer(rank: Connection, gpu: str, geometry: Geometry, namespace: KvNamespace, config: TransferConfig) -> None:
    """Serve until the rank hangs up.

    It hears tickets (push there), numbers of blocks (open a landing), grants and digests; it says tickets of landings,
    grants, digests, and when a landing or a push has ended.
    """
    alarm = Alarm()
    agent = TransferAgent(make_pool(gpu, geometry).memory(), namespace, config, time.monotonic, alarm.ring)
    rank.send(None)
    blocks = range(geometry.blocks)
    while True:
        ready = wait([alarm.fileno(), rank])
        if alarm.fileno() in ready:
            alarm.clear()
        for event in agent.events():
            if isinstance(event, Granted | Landed | LandingFailed | PushEnded):
                rank.send(event)
            elif isinstance(event, SegmentSent):
                rank.send(event.digest)
        while rank.poll():
            try:
                message: Ticket | Land | Granted | SegmentDigest = rank.recv()
            except EOFError:
                agent.close()
                return
            _obey(agent, message, blocks, rank)


def _obey(
    agent: TransferAgent, message: Ticket | Land | Granted | SegmentDigest, blocks: Sequence[int], rank: Connection
) -> None:
    match message:
        case Ticket():
            # All its pushes may read the same blocks.
            held = blocks[: max(each.first_block + each.block_count for each in message.segments)]
            agent.push(message, held)
            agent.ready(message.transfer_id, message.namespace.layers, len(held))
        case Granted():
            agent.granted(message.transfer_id, message.segment)
        case SegmentDigest():
            agent.pushed(message)
        case int():
            rank.send(agent.open_landing(blocks[:message], 0, 0, LANDING_SECONDS))
