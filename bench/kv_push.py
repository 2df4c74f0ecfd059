"""KV between two processes: pushes of scattered blocks against bare ucxx, lookups against gRPC.

    python -m bench.kv_push [--blocks 1000] [--rounds 9]

Compared things alternate within one run; figures are medians, and the transport is what UCX says that it chose.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence

from bench.kv_push_ends import Ends, Geometry
from transfer.config import TransferConfig

# Layers of a block, and the bytes of one in one layer: 64 tokens of DeepSeek's latent in bf16.
LAYERS = 8
PIECE_BYTES = 64 * 576 * 2
# UCX_TLS of each comparison.
TRANSPORTS = ("tcp", "posix,self")
IDLE_SECONDS = 5.0
LOOKUPS = 2000
LOOKUP_BLOCKS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--slot-bytes", type=int, default=TransferConfig().slot_bytes)
    parser.add_argument("--slots", type=int, default=TransferConfig().slots)
    arguments = parser.parse_args()
    geometry = Geometry(LAYERS, arguments.blocks, PIECE_BYTES)
    sys.stdout.write(f"{arguments.blocks} scattered blocks, {geometry.size_bytes / 1e6:.0f} MB a push\n")
    for transports in TRANSPORTS:
        config = TransferConfig(transports=transports, slot_bytes=arguments.slot_bytes, slots=arguments.slots)
        _compare(config, geometry, arguments.rounds)


def _compare(config: TransferConfig, geometry: Geometry, rounds: int) -> None:
    with Ends(config, geometry) as ends:
        ends.push(), ends.bare()
        pairs = [(ends.bare(), ends.push()) for _ in range(rounds)]
        bare, push = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
        ratio = statistics.median(bare / push for bare, push in pairs)
        name = ends.transport()
        sys.stdout.write(
            f"{name:6} bare {geometry.size_bytes / bare / 1e9:6.2f} GB/s   "
            f"push {geometry.size_bytes / push / 1e9:6.2f} GB/s   {ratio:.0%} of bare\n"
        )
        idle = ends.idle_cpu(IDLE_SECONDS)
        sys.stdout.write(f"{name:6} idle agents use {idle[0]:.2%} and {idle[1]:.2%} of a core\n")
        ucx, grpc = ends.lookups(LOOKUPS, LOOKUP_BLOCKS)
        sys.stdout.write(
            f"{name:6} lookup of {LOOKUP_BLOCKS} blocks: UCX {_quantiles(ucx)}   gRPC {_quantiles(grpc)}"
            f"   {statistics.median(grpc) / statistics.median(ucx):.1f} times faster\n"
        )
        sys.stdout.flush()


def _quantiles(seconds: Sequence[float]) -> str:
    cuts = statistics.quantiles(seconds, n=100)
    return f"p50 {cuts[49] * 1e6:.0f} us, p99 {cuts[98] * 1e6:.0f} us"


if __name__ == "__main__":
    main()
