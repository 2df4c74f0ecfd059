"""TCP ports: which can be listened on, and a free one."""

import socket


def why_not(host: str, port: int) -> str | None:
    """Why `host:port` cannot be listened on, in words; None where it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: connections of an earlier server that are still closing do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago; whoever listens on it may still find it taken."""
    with socket.create_server((host, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
