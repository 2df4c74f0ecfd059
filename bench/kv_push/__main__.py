"""KV moved between two processes: pushes of scattered blocks and bare ucxx, lookups and gRPC.

    python -m bench.kv_push [--blocks 1000] [--rounds 9]
    python -m bench.kv_push --gpus 0 1 --layers 61 --blocks 64 --slot-bytes 67108864 [--requests 4]

Compared transfers alternate within one run. Figures are medians, and the transport is what UCX says that it chose.
`--gpus` names the receiver's GPU and the sender's; both pools then lie on GPUs, and the default transports are UCX's
own choice and `cuda_copy,tcp`, as between GPUs that cannot map each other's memory. `--requests` prompts are pushed at
a time.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence

from bench.kv_push.ends import Ends
from bench.kv_push.pools import Geometry
from launcher.gpus import find_gpus
from transfer.config import TransferConfig

# One block in one layer: 64 tokens of DeepSeek's latent in bf16.
PIECE_BYTES = 64 * 576 * 2
# The value of UCX_TLS in each comparison.
TRANSPORTS = ("tcp", "posix,self")
GPU_TRANSPORTS = (None, "cuda_copy,tcp")
WARM_ROUNDS = 2
# Pause before each transfer: a long one, or only until the transfer before it has ended.
SLEEP_SECONDS = 20e-3
GAP_SECONDS = 500e-6
IDLE_SECONDS = 2.0
LOOKUPS = 2000
LOOKUP_BLOCKS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1000, help="of a request")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--gpus", nargs=2, metavar="GPU", help="the receiver's and the sender's")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--slot-bytes", type=int, default=TransferConfig().slot_bytes)
    parser.add_argument("--slots", type=int, default=TransferConfig().slots)
    arguments = parser.parse_args()
    if arguments.gpus and not find_gpus():
        parser.error("--gpus: there is no GPU here")
    requests = arguments.requests
    geometry = Geometry(arguments.layers, arguments.blocks * requests, PIECE_BYTES, requests)
    sys.stdout.write(
        f"{requests} requests of {arguments.blocks} scattered blocks in {arguments.layers} layers,"
        f" {geometry.size_bytes / 1e6:.0f} MB, in slots of {arguments.slot_bytes / 1e6:.1f} MB\n"
    )
    gpus = tuple(arguments.gpus) if arguments.gpus else (None, None)
    for transports in GPU_TRANSPORTS if arguments.gpus else TRANSPORTS:
        config = TransferConfig(transports=transports, slot_bytes=arguments.slot_bytes, slots=arguments.slots)
        with Ends(config, geometry, gpus) as ends:
            _compare_pushes(ends, geometry, arguments.rounds)
            if not arguments.gpus:
                _compare_lookups(ends)


def _compare_pushes(ends: Ends, geometry: Geometry, rounds: int) -> None:
    for _ in range(WARM_ROUNDS):
        _seconds(ends)
    measured = [_seconds(ends) for _ in range(rounds)]
    name = ends.transport()
    for kind in measured[0]:
        bare, push = (statistics.median(each[kind][part] for each in measured) for part in (0, 1))
        ratio = statistics.median(each[kind][0] / each[kind][1] for each in measured)
        sys.stdout.write(
            f"{name:9} {kind:6} bare {bare * 1e3:8.2f} ms, push {push * 1e3:8.2f} ms"
            f" {geometry.size_bytes / push / 1e9:7.2f} GB/s  {ratio:.0%} of bare\n"
        )
    idle = ends.idle_cpu(IDLE_SECONDS)
    sys.stdout.write(f"{name:9} idle agents use {idle[0]:.2%} and {idle[1]:.2%} of a core\n")
    sys.stdout.flush()


def _seconds(ends: Ends) -> dict[str, tuple[float, float]]:
    """One round: for each kind of push, the seconds that bare ucxx takes and those that we take."""
    return {
        "alone": (ends.bare(SLEEP_SECONDS), ends.push(SLEEP_SECONDS)),
        "third": (ends.bare(GAP_SECONDS), ends.push(GAP_SECONDS, times=3)),
    }


def _compare_lookups(ends: Ends) -> None:
    ucx, grpc = ends.lookups(LOOKUPS, LOOKUP_BLOCKS)
    sys.stdout.write(
        f"{ends.transport():9} lookup of {LOOKUP_BLOCKS} blocks: UCX {_quantiles(ucx)}   gRPC {_quantiles(grpc)}"
        f"   {statistics.median(grpc) / statistics.median(ucx):.1f} times faster\n"
    )
    sys.stdout.flush()


def _quantiles(seconds: Sequence[float]) -> str:
    cuts = statistics.quantiles(seconds, n=100)
    return f"p50 {cuts[49] * 1e6:.0f} us, p99 {cuts[98] * 1e6:.0f} us"


if __name__ == "__main__":
    main()
