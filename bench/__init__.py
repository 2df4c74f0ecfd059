"""Load generation, and what the mesh costs: measured, not tested."""

import os

# grpc reads this when it is imported. Benches start processes while channels are open; these processes use no gRPC
# before they exec, so gRPC need not prepare for forks.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
