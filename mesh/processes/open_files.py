"""Divides the files that a process may open among the connections that others make to it.

A process without a free file can neither take a connection nor refuse it, and fails where it opens a file for itself.
"""

import resource
import sys

# Files that a service has open for itself, and some more: its ports, its links to others, what its event loops wait on.
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


def connections(eighths: int) -> int:
    """How many connections fit into this many eighths of the files beyond the process's own; at least one."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (min(_count(allowed), MOST_FILES) - OWN_FILES) * eighths // 8)


def _count(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
