"""Keepalive settings, by which either end of a connection notices that its peer no longer answers."""


def _options(after_ms: int, within_ms: int) -> tuple[tuple[str, int], ...]:
    """Send a ping after `after_ms` without data; close the connection if the answer takes longer than `within_ms`.

    gRPC checks for data only every `after_ms`, so a ping may go out that much later. In grpcio 1.85
    `http2.ping_timeout_ms` (60 s by default) decides when the answer is late. `keepalive_timeout_ms` sets
    TCP_USER_TIMEOUT, which notices lost packets but not a frozen process. A thread of gRPC answers pings, so a service
    that computes for seconds is not given up.
    """
    return (
        ("grpc.keepalive_time_ms", after_ms),
        ("grpc.keepalive_timeout_ms", within_ms),
        ("grpc.http2.ping_timeout_ms", within_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


# Between services: a peer that is cut off is given up after 5 to 7 s. Until then its streams wait.
KEEPALIVE = _options(after_ms=2_000, within_ms=3_000)
# For a gateway's clients: their networks may fail for longer, and not every client can resume a broken stream.
# A connection that has had no call for five minutes is closed, so that those that clients forgot take no places of
# others; a client connects again at its next call.
CLIENTS_KEEPALIVE = (*_options(after_ms=10_000, within_ms=5_000), ("grpc.max_connection_idle_ms", 300_000))
# A server closes the connection of a peer that pings more often than this.
SHORTEST_PING_INTERVAL_MS = 1_000
