"""Who may call whom: real certificates of a development CA, on loopback."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.authority import Authority
from mesh.config import ServerConfig, TlsConfig
from mesh.errors import ConfigError, MeshError, PermissionDenied, Retry
from mesh.rpc.channel import Channels, MutualTlsChannels
from mesh.rpc.failures import from_rpc_error
from mesh.rpc.identity import Identity, Role, caller
from mesh.rpc.server import MeshServer, Registration
from mesh.tls import for_clients, server_tls
from tests.support.certificates import certified, channels_as, files_in
from tests.support.raw_service import SERVICE, raw_method, raw_registration
from tests.support.waiting import PATIENCE_SECONDS


async def say_who(request: bytes, context: Any) -> bytes:
    return str(caller.get()).encode()


def serve(tls: TlsConfig, *roles: Role, **config: Any) -> MeshServer:
    raw = raw_registration(unary_unary=say_who)
    registration = Registration(raw.add, None, SERVICE, serves={"unary_unary": roles})
    return MeshServer(ServerConfig(drain_seconds=0, **config), "test", [registration], server_tls(tls))


async def ask(channels: Channels, endpoint: str, role: Role | None = Role.SCHEDULER) -> bytes:
    async with channels.open(endpoint, role) as channel:
        answer: bytes = await raw_method(channel, "unary_unary")(b"", timeout=60)
    return answer


async def test_a_handler_learns_who_calls(tmp_path: Path) -> None:
    async with serve(certified(tmp_path, Role.SCHEDULER, "s"), Role.GATEWAY) as server:
        name = "10.0.0.1:8001/ä"
        assert await ask(channels_as(tmp_path, Role.GATEWAY, name), server.endpoint) == f"gateway {name!r}".encode()


async def test_a_handshake_that_does_not_end_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger needs no certificate to begin one, and each takes a file of the service."""
    monkeypatch.setattr("mesh.rpc.server.HANDSHAKE_MS", 200)
    async with serve(certified(tmp_path, Role.SCHEDULER, "s"), Role.GATEWAY) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await asyncio.wait_for(reader.read(), PATIENCE_SECONDS) == b""
        writer.close()


async def test_a_method_refuses_a_role_that_it_does_not_serve(tmp_path: Path) -> None:
    async with serve(certified(tmp_path, Role.SCHEDULER, "s"), Role.GATEWAY) as server:
        with pytest.raises(PermissionDenied, match=r"decode 'd' may not call .* serves gateway"):
            await ask(channels_as(tmp_path, Role.DECODE, "d"), server.endpoint)


async def test_a_method_without_roles_refuses_all_callers(tmp_path: Path) -> None:
    async with serve(certified(tmp_path, Role.SCHEDULER, "s")) as server:
        with pytest.raises(PermissionDenied, match="serves nobody"):
            await ask(channels_as(tmp_path, Role.GATEWAY, "g"), server.endpoint)


async def test_a_caller_without_a_certificate_is_refused(tmp_path: Path) -> None:
    files = certified(tmp_path, Role.SCHEDULER, "s")
    only_ca = Channels(grpc.ssl_channel_credentials(files.ca.read_bytes()))
    async with serve(files, Role.GATEWAY) as server:
        for channels in (Channels(), only_ca):
            with pytest.raises(MeshError) as raised:
                await ask(channels, server.endpoint)
            assert raised.value.retry is Retry.THIS_CALL


async def test_a_certificate_of_another_ca_is_refused(tmp_path: Path) -> None:
    files = certified(tmp_path, Role.SCHEDULER, "s")
    stranger = certified(tmp_path, Role.GATEWAY, "g", Authority.new(days=1))
    # It trusts the server; the server does not trust it.
    stranger = stranger.model_copy(update={"ca": files.ca})
    async with serve(files, Role.GATEWAY) as server:
        with pytest.raises(MeshError):
            await ask(MutualTlsChannels(stranger), server.endpoint)


async def test_a_client_calls_no_server_of_another_role(tmp_path: Path) -> None:
    async with serve(certified(tmp_path, Role.DECODE, "d"), Role.GATEWAY) as server:
        with pytest.raises(MeshError):
            await ask(channels_as(tmp_path, Role.GATEWAY, "g"), server.endpoint, Role.SCHEDULER)


@pytest.mark.parametrize(
    "path", ["elsewhere/gateway/g", "deepmesh/king/g", "deepmesh/gateway/", "deepmesh/gateway/g/h"]
)
def test_a_uri_of_no_service_is_no_identity(path: str) -> None:
    assert Identity.parse(f"spiffe://{path}") is None


async def test_probes_need_no_certificate(tmp_path: Path) -> None:
    async with serve(certified(tmp_path, Role.SCHEDULER, "s"), Role.GATEWAY, health_port=0) as server:
        await server.ready()
        async with Channels().open(f"127.0.0.1:{server.health_port}") as channel:
            request = health_pb2.HealthCheckRequest(service="readiness")
            response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
            assert response.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(MeshError):
                await raw_method(channel, "unary_unary")(b"", timeout=60)


async def test_a_client_without_a_certificate_calls_a_server_for_clients(tmp_path: Path) -> None:
    files = certified(tmp_path, Role.GATEWAY, "g", hosts=["127.0.0.1"])
    channels = Channels(grpc.ssl_channel_credentials(files.ca.read_bytes()))
    tls = for_clients(files.certificate, files.key)
    raw = raw_registration(unary_unary=say_who)
    async with MeshServer(ServerConfig(drain_seconds=0), "test", [raw], tls) as server:
        assert await ask(channels, server.endpoint) == b"None"


async def test_certificates_and_ca_are_replaced_without_a_restart(tmp_path: Path) -> None:
    server_files = certified(tmp_path, Role.SCHEDULER, "s")
    client_files = certified(tmp_path, Role.GATEWAY, "g")
    async with (
        serve(server_files, Role.GATEWAY) as server,
        MutualTlsChannels(client_files).open(server.endpoint, Role.SCHEDULER) as channel,
    ):
        method = raw_method(channel, "unary_unary")
        assert await method(b"", timeout=60) == b"gateway 'g'"
        other = Authority.new(days=1)
        other.issue(Identity(Role.SCHEDULER, "s"), server_files.key.parent)
        other.issue(Identity(Role.GATEWAY, "g-renewed"), client_files.key.parent)
        assert await method(b"", timeout=60) == b"gateway 'g-renewed'"
        with pytest.raises(MeshError):
            await ask(channels_as(tmp_path, Role.GATEWAY, "of the old CA"), server.endpoint)


async def test_a_stream_outlives_the_renewal_of_its_certificate(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def twice(request: bytes, context: Any) -> Any:
        yield b"before"
        await release.wait()
        yield b"after"

    files = certified(tmp_path, Role.GATEWAY, "g")
    raw = raw_registration(unary_stream=twice, unary_unary=say_who)
    serves = {"unary_stream": [Role.GATEWAY], "unary_unary": [Role.GATEWAY]}
    registration = Registration(raw.add, None, SERVICE, serves=serves)
    tls = server_tls(certified(tmp_path, Role.SCHEDULER, "s"))
    async with (
        MeshServer(ServerConfig(drain_seconds=1), "test", [registration], tls) as server,
        MutualTlsChannels(files).open(server.endpoint, Role.SCHEDULER) as channel,
    ):
        call = raw_method(channel, "unary_stream")(b"", timeout=60)
        assert await call.read() == b"before"
        certified(tmp_path, Role.GATEWAY, "g")
        await raw_method(channel, "unary_unary")(b"", timeout=60)
        release.set()
        assert await call.read() == b"after"
        assert await call.read() is grpc.aio.EOF


async def test_a_half_written_renewal_changes_nothing(tmp_path: Path) -> None:
    files = certified(tmp_path, Role.SCHEDULER, "s")
    async with serve(files, Role.GATEWAY) as server:
        gateway = channels_as(tmp_path, Role.GATEWAY, "g")
        files.certificate.write_bytes(b"not a certificate")
        assert await ask(gateway, server.endpoint) == b"gateway 'g'"


def test_missing_files_are_an_error_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*certificate\.pem"):
        server_tls(files_in(tmp_path))


async def test_errors_of_streams_name_the_reason(tmp_path: Path) -> None:
    raw = raw_registration(unary_stream=say_who)
    tls = server_tls(certified(tmp_path, Role.SCHEDULER, "s"))
    async with (
        MeshServer(ServerConfig(drain_seconds=0), "test", [raw], tls) as server,
        channels_as(tmp_path, Role.GATEWAY, "g").open(server.endpoint, Role.SCHEDULER) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await raw_method(channel, "unary_stream")(b"", timeout=60).read()
        assert isinstance(from_rpc_error(raised.value), PermissionDenied)
