"""`python -m decode_svc --config configs/decode.yaml`"""

import sys

from deepmesh.internal.v1 import decode_pb2_grpc

from decode_svc.config import DecodeConfig
from decode_svc.prefill_link import PrefillLink
from decode_svc.service import DecodeServicer
from decode_svc.worker import DecodeWorker
from mesh.channel import Channels
from mesh.launch import launch
from mesh.server import MeshServer, Registration
from worker.serving import serve_worker

SERVICE = "deepmesh.internal.v1.DecodeService"


async def serve(config: DecodeConfig) -> None:
    """Run a worker until a signal. Raises EngineFailed if one of its ranks dies before."""
    channels = Channels()
    servicer, prefill_link = DecodeServicer(), PrefillLink(channels)
    add = decode_pb2_grpc.add_DecodeServiceServicer_to_server
    async with MeshServer(config.server, "decode", [Registration(add, servicer, SERVICE, ("Attach",))]) as server:
        worker = await DecodeWorker.start(config, server.endpoint, prefill_link, channels)
        try:
            servicer.open(worker)
            await serve_worker(worker, server, config, channels)
        finally:
            await prefill_link.close()
            await worker.host.close()


if __name__ == "__main__":
    sys.exit(launch("decode", DecodeConfig, serve))
