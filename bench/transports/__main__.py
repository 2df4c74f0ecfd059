"""Which of UCX's transports KV takes between two containers of one host, by what they share, and how fast it is.

    python -m bench.transports [--blocks 200] [--rounds 5]
    python -m bench.transports --gpus 0 1

Two processes push KV in namespaces of their own, made as a container runtime makes them. With `--gpus` the pools lie on
the receiver's GPU and the sender's, once with only this one visible to each, and once with both. Needs root and `ip`.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

from bench.kv_push.ends import Ends
from bench.kv_push.pools import Geometry
from bench.transports.containers import Container, two_networks, why_no_containers
from launcher.gpus import find_gpus
from transfer.config import TransferConfig

# DeepSeek-R1's latents of 64 tokens in one layer, in bf16.
PIECE_BYTES = 64 * 576 * 2
LAYERS = 8
WARM_ROUNDS = 2
GAP_SECONDS = 500e-6
GPU_SLOT_BYTES = 64 << 20


class Sharing(NamedTuple):
    """What each of the two containers has for itself."""

    name: str
    ipc: bool = False
    pid: bool = False
    shm: bool = False
    network: bool = False


SHARINGS = (
    Sharing("all shared: processes of one container"),
    Sharing("own IPC", ipc=True),
    Sharing("own PIDs", pid=True),
    Sharing("own /dev/shm of 64 MB", shm=True),
    Sharing("own network", network=True),
    Sharing("own network and PIDs", pid=True, network=True),
    Sharing("own network, IPC and /dev/shm", ipc=True, shm=True, network=True),
    Sharing("own IPC, PIDs and /dev/shm, host's network", ipc=True, pid=True, shm=True),
    Sharing("nothing shared: containers as runtimes make them", ipc=True, pid=True, shm=True, network=True),
)


class Measured(NamedTuple):
    transport: str
    bytes_per_second: float
    # Whether the receiver counts it as KV that should not have gone over TCP.
    warned: bool

    def __str__(self) -> str:
        return f"{self.transport}, {self.bytes_per_second / 1e9:.2f} GB/s{', warned' if self.warned else ''}"


def measure(
    sharing: Sharing,
    networks: tuple[str, str],
    geometry: Geometry,
    rounds: int,
    gpus: tuple[str | None, str | None] = (None, None),
) -> Measured:
    """networks: joined namespaces; gpus: values of CUDA_VISIBLE_DEVICES, None for pools in host memory."""
    places = [
        Container(name, sharing.ipc, sharing.pid, sharing.shm, network if sharing.network else None)
        for name, network in zip(("decode", "prefill"), networks, strict=True)
    ]
    config = TransferConfig(slot_bytes=GPU_SLOT_BYTES) if gpus[0] else TransferConfig()
    with Ends(config, geometry, gpus, (places[0].enter, places[1].enter)) as ends:
        for _ in range(WARM_ROUNDS):
            ends.push(GAP_SECONDS)
        seconds = [ends.push(GAP_SECONDS, times=3) for _ in range(rounds)]
        rate = geometry.size_bytes / statistics.median(seconds)
        return Measured(ends.transport(), rate, bool(ends.local_tcp_bytes()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=200, help="of a request, with 8 layers")
    parser.add_argument("--gpus", nargs=2, metavar="GPU", help="the receiver's and the sender's")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    why = why_no_containers()
    if why is not None:
        parser.error(f"this machine cannot make containers' namespaces: {why}")
    if arguments.gpus and not find_gpus():
        parser.error("--gpus: there is no GPU here")
    geometry = Geometry(LAYERS, arguments.blocks, PIECE_BYTES)
    columns = _columns(arguments.gpus)
    sys.stdout.write(f"{geometry.size_bytes / 1e6:.0f} MB a push, medians of {arguments.rounds}\n\n")
    sys.stdout.write(f"| two containers have | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}\n")
    with two_networks() as networks:
        for sharing in SHARINGS:
            found = [str(measure(sharing, networks, geometry, arguments.rounds, gpus)) for gpus in columns.values()]
            sys.stdout.write(f"| {sharing.name} | {' | '.join(found)} |\n")
            sys.stdout.flush()


def _columns(gpus: Sequence[str] | None) -> dict[str, tuple[str | None, str | None]]:
    host: dict[str, tuple[str | None, str | None]] = {"KV in host memory": (None, None)}
    if gpus is None:
        return host
    here, there = gpus
    return host | {
        "on GPUs, each sees its own": (here, there),
        "on GPUs, each sees both": (f"{here},{there}", f"{there},{here}"),
    }


if __name__ == "__main__":
    main()
