"""KV moved between two processes, compared with bare ucxx and gRPC."""
