"""Channels with and without credentials, against a server with a real certificate."""

import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from mesh.channel import Channels
from mesh.errors import MeshError, Retry

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")

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
    directory: Path = tmp_path_factory.mktemp("certificate")
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *CERTIFY, *names, *files], check=True, capture_output=True)
    return key.read_bytes(), certificate.read_bytes()


@asynccontextmanager
async def tls_server(key: bytes, certificate: bytes) -> AsyncIterator[str]:
    """A health service behind TLS; yields its endpoint."""
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def ask(channels: Channels, endpoint: str) -> int:
    async with channels.open(endpoint) as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    return int(response.status)


async def test_channels_with_credentials_speak_tls(certificate: tuple[bytes, bytes]) -> None:
    trusted = Channels(grpc.ssl_channel_credentials(root_certificates=certificate[1]))
    async with tls_server(*certificate) as endpoint:
        assert await ask(trusted, endpoint) == health_pb2.HealthCheckResponse.SERVING


async def test_channels_without_credentials_are_plaintext(certificate: tuple[bytes, bytes]) -> None:
    async with tls_server(*certificate) as endpoint:
        with pytest.raises(MeshError) as raised:
            await ask(Channels(), endpoint)
    assert raised.value.retry is Retry.THIS_CALL
