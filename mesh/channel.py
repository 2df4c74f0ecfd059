"""Channels to other services of the mesh."""

import grpc

from mesh.interceptors import CallInterceptor

MAX_MESSAGE_BYTES = 16 * 1024 * 1024


def open_channel(endpoint: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """A channel to `endpoint` ("host:port") that connects at the first call and reconnects by itself, within 2 s.

    Unary calls carry the request id and raise MeshError; see `mesh.interceptors.CallInterceptor` for streams.
    """
    options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Services of the mesh are never behind the environment's web proxy.
        ("grpc.enable_http_proxy", 0),
    ]
    return grpc.aio.insecure_channel(endpoint, options=options, interceptors=[CallInterceptor()])
