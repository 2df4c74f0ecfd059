"""Divides the files that the gateway's process may open among the connections of its clients.

A process without a free file can neither take a connection nor refuse it: the client sees a reset.
"""

import resource
import sys

# Files that a gateway has open without a client, and some more: its ports, its links to schedulers and a few workers,
# what its event loops wait on.
OWN_FILES = 32
# More connections than fit into these are no use to one process.
MOST_FILES = 65_536


def raise_limit() -> None:
    """Let the process open as many files as the system permits, up to MOST_FILES. Shells and systemd often start
    processes with a limit of 1,024 that they may raise themselves.
    """
    allowed, permitted = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(_count(permitted), MOST_FILES)
    if _count(allowed) < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, permitted))


def http_connections() -> int:
    """Three quarters of the files beyond the process's own."""
    return max(1, _for_clients() * 3 // 4)


def grpc_connections() -> int:
    """A quarter of the files beyond the process's own."""
    return max(1, _for_clients() // 4)


def _for_clients() -> int:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(_count(allowed), MOST_FILES) - OWN_FILES


def _count(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
