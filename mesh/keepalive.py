"""How either end of a connection notices that its peer has stopped answering, though the connection is still open."""

# A ping goes out after 10 s without data, and the connection is closed if its answer takes longer than 5 s. In grpcio
# 1.85 `http2.ping_timeout_ms` (60 s by default) decides that. `keepalive_timeout_ms` sets TCP_USER_TIMEOUT,
# which notices lost packets but not a frozen process.
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
