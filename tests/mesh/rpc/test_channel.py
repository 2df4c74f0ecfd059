"""Channels with and without credentials, against a server with a real certificate."""

import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from mesh.errors import MeshError, Retry
from mesh.rpc.channel import Channels
from tests.support.name_server import name_server
from tests.support.waiting import eventually

CERTIFY = [
    "req",
    "-x509",
    "-newkey",
    "ec",
    "-pkeyopt",
    "ec_paramgen_curve:prime256v1",
    "-nodes",
    "-days",
    "1",
    "-subj",
    "/CN=server",
]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """A private key and its self-signed certificate for 127.0.0.1, as PEM."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    directory: Path = tmp_path_factory.mktemp("certificate")
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *CERTIFY, *names, *files], check=True, capture_output=True)
    return key.read_bytes(), certificate.read_bytes()


@asynccontextmanager
async def health_server(
    credentials: grpc.ServerCredentials | None = None, port: int = 0, host: str = "127.0.0.1"
) -> AsyncIterator[str]:
    """A health service, with TLS if it has credentials; yields its endpoint."""
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    address = f"{host}:{port}"
    port = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    await server.start()
    try:
        yield f"{host}:{port}"
    finally:
        await server.stop(0)


async def ask_over(channel: grpc.aio.Channel) -> int:
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    return int(response.status)


async def ask(channels: Channels, endpoint: str) -> int:
    async with channels.open(endpoint) as channel:
        return await ask_over(channel)


async def test_channels_with_credentials_speak_tls(certificate: tuple[bytes, bytes]) -> None:
    trusted = Channels(grpc.ssl_channel_credentials(root_certificates=certificate[1]))
    async with health_server(grpc.ssl_server_credentials([certificate])) as endpoint:
        assert await ask(trusted, endpoint) == health_pb2.HealthCheckResponse.SERVING


async def test_channels_without_credentials_are_plaintext(certificate: tuple[bytes, bytes]) -> None:
    async with health_server(grpc.ssl_server_credentials([certificate])) as endpoint:
        with pytest.raises(MeshError) as raised:
            await ask(Channels(), endpoint)
    assert raised.value.retry is Retry.THIS_CALL


async def test_a_new_channel_ignores_an_older_ones_backoff() -> None:
    channels = Channels()
    with socket.socket() as holder:
        # No process listens at this port, or is given it, until gRPC's server shares it.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        async with channels.open(f"127.0.0.1:{port}") as older:
            with pytest.raises(MeshError):
                await ask_over(older)
            async with health_server(port=port) as endpoint:
                assert await ask(channels, endpoint) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.check("faults")
async def test_a_service_at_another_address_is_soon_found() -> None:
    """As a pod that is started again: its name has no address for a while, and then another one."""
    async with name_server() as names, AsyncExitStack() as stack:
        async with health_server(host="127.0.0.2") as endpoint:
            names.address, port = "127.0.0.2", int(endpoint.rpartition(":")[2])
            named = f"dns://127.0.0.1:{names.port}/service.test:{port}"
            channel = await stack.enter_async_context(Channels().open(named))
            await ask_over(channel)
        names.address, begun = None, time.monotonic()

        async def answers() -> bool:
            with suppress(MeshError):
                return await ask_over(channel) == health_pb2.HealthCheckResponse.SERVING
            return False

        assert not await answers()
        await stack.enter_async_context(health_server(port=port, host="127.0.0.3"))
        names.address = "127.0.0.3"
        await eventually(answers)
        assert time.monotonic() - begun < 20
