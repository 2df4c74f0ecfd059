"""Which of UCX's transports KV takes between two containers of one host, by what they share, and how fast it is.

    python -m bench.transports [--blocks 200] [--rounds 5]
    python -m bench.transports --gpus 0 1

Two processes push KV in namespaces of their own, made as a container runtime makes them. With `--gpus` the pools lie on
the receiver's GPU and the sender's: with only this one visible to each (CUDA_VISIBLE_DEVICES), with both, and with the
device of the other denied, as Kubernetes' device plugin does. Needs root and `ip`;
`--one-network` does without `ip`, and without the containers that have a network of their own. Processes of several
combinations start at once, where there are cores for them; one combination at a time moves KV.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
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
START_SECONDS = 120.0


# All but shared memory.
OTHER_TRANSPORTS = "tcp,self", "cuda_ipc,cuda_copy,tcp,self"


class Sharing(NamedTuple):
    """What each of the two containers has for itself."""

    name: str
    ipc: bool = False
    pid: bool = False
    shm: bool = False
    network: bool = False
    # UCX_TLS with pools in host memory and on GPUs; None leaves the choice to UCX.
    transports: tuple[str, str] | None = None


SHARINGS = (
    Sharing("all shared: processes of one container"),
    Sharing("own IPC", ipc=True),
    Sharing("own PIDs", pid=True),
    Sharing("own /dev/shm of 64 MB", shm=True),
    Sharing("own network", network=True),
    Sharing("own network, UCX_TLS without shared memory", network=True, transports=OTHER_TRANSPORTS),
    Sharing("own network and PIDs", pid=True, network=True),
    Sharing("own network, IPC and /dev/shm: compose.gpu.yaml", ipc=True, shm=True, network=True),
    Sharing("own IPC, PIDs and /dev/shm, host's network", ipc=True, pid=True, shm=True),
    Sharing("nothing shared: containers as runtimes make them", ipc=True, pid=True, shm=True, network=True),
)


class Gpus(NamedTuple):
    """What the receiver and the sender have."""

    # Values of CUDA_VISIBLE_DEVICES; None for pools in host memory.
    visible: tuple[str | None, str | None]
    # The GPUs whose device each may open; None for all.
    devices: tuple[str | None, str | None] = (None, None)


HOST = Gpus((None, None))


class Measured(NamedTuple):
    transport: str
    bytes_per_second: float
    # Whether the receiver counts it as KV that should not have gone over TCP.
    warned: bool

    def __str__(self) -> str:
        return f"{self.transport}, {self.bytes_per_second / 1e9:.2f} GB/s{', warned' if self.warned else ''}"


class Pair:
    """Two processes in their namespaces, which have been started."""

    def __init__(
        self,
        sharing: Sharing,
        networks: tuple[str, str] | None,
        geometry: Geometry,
        gpus: Gpus = HOST,
        limit_seconds: float = 60.0,
    ) -> None:
        """networks: joined namespaces; limit_seconds: of a push."""
        places = [
            Container(name, sharing.ipc, sharing.pid, sharing.shm, network if sharing.network else None, device)
            for name, network, device in zip(("decode", "prefill"), networks or (None, None), gpus.devices, strict=True)
        ]
        on_gpus = gpus.visible[0] is not None
        transports = sharing.transports and sharing.transports[on_gpus]
        config = TransferConfig(transports=transports)
        if on_gpus:
            config = config.model_copy(update={"slot_bytes": GPU_SLOT_BYTES})
        self._geometry = geometry
        self._limit_seconds = limit_seconds
        self._ends = Ends(config, geometry, gpus.visible, (places[0].enter, places[1].enter), limit_seconds)

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *exception: object) -> None:
        self._ends.__exit__(*exception)

    def measure(self, rounds: int) -> Measured | str:
        """Text says why there is nothing measured."""
        try:
            self._ends.wait_until_ready(START_SECONDS)
            for _ in range(WARM_ROUNDS):
                self._ends.push(GAP_SECONDS)
            seconds = [self._ends.push(GAP_SECONDS, times=3) for _ in range(rounds)]
            rate = self._geometry.size_bytes / statistics.median(seconds)
            return Measured(self._ends.transport(), rate, bool(self._ends.local_tcp_bytes()))
        except TimeoutError:
            return f"none: no landing ends within {self._limit_seconds:.0f} s"
        except EOFError:
            return "none: a process ends"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=200, help="of a request, with 8 layers")
    parser.add_argument("--gpus", nargs=2, metavar="GPU", help="the receiver's and the sender's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit-seconds", type=float, default=60.0, help="of a push")
    parser.add_argument("--one-network", action="store_true", help="leave out containers with a network of their own")
    arguments = parser.parse_args()
    why = why_no_containers(networks=not arguments.one_network)
    if why is not None:
        parser.error(f"this machine cannot make containers' namespaces: {why}")
    if arguments.gpus and not find_gpus():
        parser.error("--gpus: there is no GPU here")
    geometry, limit = Geometry(LAYERS, arguments.blocks, PIECE_BYTES), arguments.limit_seconds
    columns = _columns(arguments.gpus)
    sharings = [each for each in SHARINGS if not (each.network and arguments.one_network)]
    sys.stdout.write(f"{geometry.size_bytes / 1e6:.0f} MB a push, medians of {arguments.rounds}\n\n")
    sys.stdout.write(f"| two containers have | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}\n")
    # A core for each process, so that none waits for another's start.
    at_once = max((os.cpu_count() or 1) // (2 * len(columns)), 1)
    with nullcontext() if arguments.one_network else two_networks() as networks:
        for first in range(0, len(sharings), at_once):
            with ExitStack() as stack:
                rows = {
                    sharing.name: [
                        stack.enter_context(Pair(sharing, networks, geometry, gpus, limit)) for gpus in columns.values()
                    ]
                    for sharing in sharings[first : first + at_once]
                }
                for name, pairs in rows.items():
                    found = " | ".join(str(pair.measure(arguments.rounds)) for pair in pairs)
                    sys.stdout.write(f"| {name} | {found} |\n")
                    sys.stdout.flush()


def _columns(gpus: Sequence[str] | None) -> dict[str, Gpus]:
    host = {"KV in host memory": HOST}
    if gpus is None:
        return host
    here, there = gpus
    return host | {
        "on GPUs, each sees its own": Gpus((here, there)),
        "on GPUs, each sees both": Gpus((f"{here},{there}", f"{there},{here}")),
        "on GPUs, each may open its own": Gpus(("0", "0"), (here, there)),
    }


if __name__ == "__main__":
    main()
