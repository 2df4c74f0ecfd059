"""The decode worker: owns a request from acceptance to its last token."""

import os

# Set before grpc is first imported. Our child, the rank, execs before it could call gRPC, whose fork handlers would log
# complaints, and may crash it before that if calls are open (SIGSEGV in grpcio 1.85.1).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
