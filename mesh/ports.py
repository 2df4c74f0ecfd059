"""Checks whether a TCP port can be listened on, and finds free ones."""

import random
import socket
from collections import deque
from pathlib import Path

from mesh.errors import ConfigError

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST, _END = 10_000, 65_536
_FEWEST = 1000
_ATTEMPTS = 100
_RESERVATIONS = 64

# Unused UDP sockets that reserve the port numbers last given out. A caller listens on its TCP port only later, at an
# unknown time; until then the socket tells this and other processes that the number is taken.
_reserved: deque[socket.socket] = deque()


def why_not(host: str, port: int) -> str | None:
    """Why `host:port` cannot be listened on, in words; None if it can."""
    try:
        with bound_socket(host, port) as probe:
            probe.listen(1)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def bound_socket(host: str, port: int, *, share: bool = False) -> socket.socket:
    """A TCP socket that is bound to `host:port`; on "::" it takes connections over IPv4, too.

    share: other sockets may listen there as well, each for a part of the connections. Raises OSError.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        # Closing connections of an earlier server do not matter.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on, outside the range from which the kernel picks ports.

    No process gets the same port again until this one ends or has been given many others. Raises ConfigError if none is
    found.
    """
    for port in random.sample(_candidates(), _ATTEMPTS):
        if why_not(host, port) is None and _reserve(host, port):
            return port
    raise ConfigError(f"no free port on {host}: name one")


def _reserve(host: str, port: int) -> bool:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    reservation = socket.socket(family, kind, protocol)
    try:
        reservation.bind(address)
    except OSError:
        reservation.close()
        return False
    _reserved.append(reservation)
    if len(_reserved) > _RESERVATIONS:
        _reserved.popleft().close()
    return True


def _candidates() -> range:
    try:
        first_ephemeral = int(_EPHEMERAL.read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return range(_FIRST, _END)
    return range(_FIRST, first_ephemeral if first_ephemeral >= _FIRST + _FEWEST else _END)
