"""The prefill worker: computes prompts and pushes their KV to whoever decodes them."""

import os

# Read when grpc is first imported. Our child, the rank, execs before it could call gRPC, whose fork handlers complain.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
