"""`python -m prefill_svc --config configs/prefill.yaml`"""

import sys

from deepmesh.internal.v1 import prefill_pb2_grpc

from mesh.channel import Channels
from mesh.launch import launch
from mesh.server import MeshServer, Registration
from prefill_svc.config import PrefillConfig
from prefill_svc.service import PrefillServicer
from prefill_svc.worker import PrefillWorker
from worker.serving import serve_worker

SERVICE = "deepmesh.internal.v1.PrefillService"


async def serve(config: PrefillConfig) -> None:
    """Run a worker until a signal. Raises EngineFailed if one of its ranks dies before."""
    channels, servicer = Channels(), PrefillServicer()
    add = prefill_pb2_grpc.add_PrefillServiceServicer_to_server
    async with MeshServer(config.server, "prefill", [Registration(add, servicer, SERVICE)]) as server:
        worker = await PrefillWorker.start(config, server.endpoint, channels)
        try:
            servicer.open(worker)
            await serve_worker(worker, server, config, channels)
        finally:
            await worker.host.close()


if __name__ == "__main__":
    sys.exit(launch("prefill", PrefillConfig, serve))
