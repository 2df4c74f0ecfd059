"""Finds out which hosts of a worker do not reach each other, before their ranks wait for each other."""

import os
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import psutil

# torch.distributed takes this name from here too.
from torch._C._distributed_c10d import Store

from engine.exchange.store import shared
from mesh.errors import EngineFailed, RankLost

# How long a connection between two hosts may take.
CONNECT_SECONDS = 5.0


def check_reach(store: Store, own: int, hosts: int, address: str) -> None:
    """Called by one rank of each host at once. own: its host's number; address: where the others are to reach it.

    If two hosts do not reach each other, all ranks raise an error: EngineFailed on the host without which the others
    most likely do, which is never the first one, and RankLost on the others.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # Connections are complete without being accepted.
    with socket.create_server(("", 0), family=family, backlog=hosts) as server:
        addresses = shared(store, "address", own, hosts, [address, server.getsockname()[1]])
        missed = [other for other in range(hosts) if other != own and not _reaches(*addresses[other])]
        all_missed = shared(store, "missed", own, hosts, missed)
    cut = [(host, other) for host, others in enumerate(all_missed) for other in others]
    if cut:
        one, other = (addresses[host][0] for host in cut[0])
        message = (
            f"the worker's host at {one} does not reach the one at {other}: open all ports between them, or name a"
            " network device by which they reach each other in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        )
        raise (EngineFailed if own == most_cut_off(cut) else RankLost)(message)


def most_cut_off(cut: Sequence[tuple[int, int]]) -> int:
    """The host with most of the missing connections, the last of several; never the first host."""
    counts = Counter(host for pair in {frozenset(pair) for pair in cut} for host in pair if host)
    return max(counts, key=lambda host: (counts[host], host))


def gloo_address() -> str:
    """Where gloo listens: on the device that GLOO_SOCKET_IFNAME names, or at an address of this machine's name, if it
    is one of this machine.
    """
    device = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in psutil.net_if_addrs().get(device, []):
            if entry.family == family:
                return entry.address
    with suppress(OSError):
        for found, *_, where in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.create_server(where, family=found):
                return str(where[0])
    return "127.0.0.1"


def _reaches(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
