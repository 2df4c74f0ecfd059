"""`python -m decode_svc --config configs/decode.yaml`"""

import asyncio
import logging
import sys
import uuid

from deepmesh.v1 import decode_pb2_grpc

from decode_svc.config import DecodeConfig
from decode_svc.service import DecodeServicer
from decode_svc.worker import DecodeWorker
from engine.identity import worker_identity
from mesh.launch import launch
from mesh.server import MeshServer, Registration
from mesh.status_link import StatusLink
from mesh.workers import WorkerRole

SERVICE = "deepmesh.v1.DecodeService"
# How long a worker that ends waits for its scheduler to know.
FAREWELL_SECONDS = 1.0
log = logging.getLogger(__name__)


async def serve(config: DecodeConfig) -> None:
    """Run a worker until a signal. Raises EngineFailed where its rank dies before."""
    servicer = DecodeServicer()
    add = decode_pb2_grpc.add_DecodeServiceServicer_to_server
    async with MeshServer(config.server, "decode", [Registration(add, servicer, SERVICE, ("Attach",))]) as server:
        worker = await DecodeWorker.start(config)
        try:
            await _serve_with(worker, servicer, server, config)
        finally:
            await worker.close()


async def _serve_with(worker: DecodeWorker, servicer: DecodeServicer, server: MeshServer, config: DecodeConfig) -> None:
    worker_id = config.worker_id or server.endpoint
    identity = worker_identity(worker.ready, WorkerRole.DECODE, worker_id, uuid.uuid4().hex, server.endpoint)
    link = StatusLink(config.scheduler, identity, worker.report, config.status_interval_seconds)
    servicer.open(worker, identity)
    following = asyncio.create_task(worker.run())
    reporting = asyncio.create_task(link.run())
    signalled = asyncio.create_task(server.until_signal())
    await server.ready()
    log.info("worker ready", extra={"fields": {"id": identity.worker_id, "endpoint": identity.endpoint}})
    await asyncio.wait({following, signalled}, return_when=asyncio.FIRST_COMPLETED)
    log.info("worker stops", extra={"fields": {"live_requests": worker.sessions.live_requests}})
    await server.drain()
    await worker.drain(config.server.drain_seconds)
    await link.told_draining(FAREWELL_SECONDS)
    reporting.cancel()
    if following.done():
        # Raises what ended it: an engine that nobody stopped.
        following.result()
    following.cancel()


if __name__ == "__main__":
    sys.exit(launch("decode", DecodeConfig, serve))
