"""Load generation, and what the mesh costs: measured, not tested."""

import os

# Read when grpc is imported. Benches start processes beside open channels, and those use no gRPC before they exec.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
