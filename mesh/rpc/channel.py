"""Channels to other services of the mesh."""

from functools import partial

import grpc

from mesh.config import TlsConfig
from mesh.rpc.identity import Role
from mesh.rpc.keepalive import KEEPALIVE
from mesh.rpc.outgoing_calls import CallInterceptor
from mesh.rpc.renewed_channel import RenewedChannel
from mesh.tls import CertificateFiles, server_name

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    *KEEPALIVE,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A pod that is started again has another address. gRPC would ask for it only 30 s after it last did.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # Each channel keeps its own reconnection backoff. A new channel to a service that is back connects at once, even if
    # an older channel to the same address still waits for its next attempt.
    ("grpc.use_local_subchannel_pool", 1),
    # The environment's web proxy is never between services of the mesh.
    ("grpc.enable_http_proxy", 0),
)


class Channels:
    """Opens every channel of a process with the same credentials.

    Created once, where the process is put together, and passed to whatever calls other services. Without credentials
    channels are plaintext: for loopback, or in a service mesh that encrypts by itself.
    """

    def __init__(self, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._credentials = credentials

    def open(self, endpoint: str, role: Role | None = None) -> grpc.aio.Channel:
        """A channel to `endpoint` ("host:port"). It connects at the first call, and reconnects by itself within 2 s, at
        another address too if its name has one by then.

        `role`: the role that must answer there, if services have certificates. Unary calls carry the request id and
        raise MeshError; for streams see `mesh.rpc.outgoing_calls.CallInterceptor`.
        """
        return _open(endpoint, self._credentials)


class MutualTlsChannels(Channels):
    """Channels that show this service's certificate and accept only a peer of the given role. A renewed certificate is
    used from the next call on.

    Raises ConfigError if the files cannot be read.
    """

    def __init__(self, config: TlsConfig) -> None:
        super().__init__()
        self._files = CertificateFiles.of(config)
        # Counts the changes of the files that were read.
        self._version = 0
        self._current = self._files.pem.channel_credentials()

    def open(self, endpoint: str, role: Role | None = None) -> grpc.aio.Channel:
        return RenewedChannel(partial(self._connect, endpoint, role), self._read_again)

    def _connect(self, endpoint: str, role: Role | None) -> grpc.aio.Channel:
        name = () if role is None else (("grpc.ssl_target_name_override", server_name(role)),)
        return _open(endpoint, self._current, name)

    def _read_again(self) -> int:
        """Read the files again if they changed. Returns the version, which each change raises by one."""
        pem = self._files.read_again()
        if pem is not None:
            self._current = pem.channel_credentials()
            self._version += 1
        return self._version


def service_channels(config: TlsConfig | None) -> Channels:
    """The channels of a service with these certificates; None is plaintext. Raises ConfigError."""
    return Channels() if config is None else MutualTlsChannels(config)


def _open(
    endpoint: str, credentials: grpc.ChannelCredentials | None, more: tuple[tuple[str, str], ...] = ()
) -> grpc.aio.Channel:
    interceptors, options = [CallInterceptor()], (*OPTIONS, *more)
    if credentials is None:
        return grpc.aio.insecure_channel(endpoint, options=options, interceptors=interceptors)
    return grpc.aio.secure_channel(endpoint, credentials, options=options, interceptors=interceptors)
