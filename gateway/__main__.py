"""The gateway process: gRPC and OpenAI HTTP on one event loop."""

import logging
import sys
from functools import partial

from deepmesh.v1 import gateway_pb2, gateway_pb2_grpc

from gateway.catalog import load_texts
from gateway.config import GatewayConfig
from gateway.gateway import Gateway
from gateway.openai.http import application
from gateway.openai.server import HttpServer
from gateway.page.server import operator_server
from gateway.processes.division import Division
from gateway.service import GatewayService
from mesh.launch import launch
from mesh.processes.open_files import connections
from mesh.rpc.channel import service_channels
from mesh.rpc.server import MeshServer, Registration
from mesh.tls import for_clients

SERVICE_NAME = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"].full_name
# Seconds that the servers give each answer's last bytes at a stop; the answers themselves have ended by then.
LAST_WORDS_SECONDS = 2.0

_log = logging.getLogger("deepmesh.gateway")


async def main(config: GatewayConfig, division: Division) -> None:
    tls = for_clients(config.public_tls.certificate, config.public_tls.key) if config.public_tls else None
    channels = service_channels(config.security.tls)
    # The operators' page serves the metrics on its own port, so the gRPC server must not open that port.
    server_config = config.server.model_copy(update={"metrics_port": None})
    several = division.processes > 1
    async with (
        Gateway(
            config, load_texts(config.models, config.sampling_defaults == "checkpoint"), channels, division.ledger
        ) as gateway,
        division.siblings() as siblings,
    ):
        registration = Registration(
            gateway_pb2_grpc.add_GatewayServiceServicer_to_server, GatewayService(gateway), SERVICE_NAME
        )
        http = HttpServer(
            config.http,
            application(gateway),
            drain_seconds=LAST_WORDS_SECONDS,
            stalled_seconds=config.limits.stalled_seconds,
            share_port=several,
        )
        page = operator_server(config, gateway, channels, siblings)
        server = MeshServer(
            server_config,
            "gateway",
            [registration],
            tls,
            public=True,
            share_ports=several,
            # The HTTP port has the others.
            connections=connections(eighths=1),
        )
        async with server, http, page:
            _log.info("listening", extra={"fields": {"grpc_port": server.port, "http_port": http.port}})
            await gateway.until(server.until_signal(), server.ready, server.drain)
            await gateway.leave(server.drain)


if __name__ == "__main__":
    division = Division()
    sys.exit(launch("gateway", GatewayConfig, partial(main, division=division), divide=division.divide))
