"""KV between two processes, against bare ucxx and gRPC."""
