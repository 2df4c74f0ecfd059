"""Channels to other services of the mesh."""

import grpc

from mesh.interceptors import CallInterceptor
from mesh.keepalive import KEEPALIVE

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    *KEEPALIVE,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Services of the mesh are never behind the environment's web proxy.
    ("grpc.enable_http_proxy", 0),
)


class Channels:
    """Opens every channel of a process with the same credentials.

    Made once, where the process is put together, and handed to whatever calls other services. Without credentials
    channels are plaintext: for loopback, or behind a service mesh that encrypts by itself.
    """

    def __init__(self, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._credentials = credentials

    def open(self, endpoint: str) -> grpc.aio.Channel:
        """A channel to `endpoint` ("host:port") that connects at the first call and reconnects by itself, within 2 s.

        Unary calls carry the request id and raise MeshError; see `mesh.interceptors.CallInterceptor` for streams.
        """
        interceptors = [CallInterceptor()]
        if self._credentials is None:
            return grpc.aio.insecure_channel(endpoint, options=OPTIONS, interceptors=interceptors)
        return grpc.aio.secure_channel(endpoint, self._credentials, options=OPTIONS, interceptors=interceptors)
