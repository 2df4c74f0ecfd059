import socket
from pathlib import Path

import pytest

from mesh import ports
from mesh.ports import bound_socket, free_port, why_not
from tests.support.ipv6 import needs_ipv6


def test_a_free_port_can_be_listened_on() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert why_not("127.0.0.1", port) == "address already in use"
    assert why_not("127.0.0.1", port) is None


def test_a_free_port_is_none_that_the_kernel_gives_away() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split())
    if first < 11_000:
        pytest.skip("this kernel gives away nearly every port")
    assert not any(first <= free_port() <= last for _ in range(50))


def test_a_free_port_is_given_away_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # As few as the fewest that are looked at: of 50 draws some would be the same.
    monkeypatch.setattr(ports, "_candidates", lambda: range(20_000, 20_100))
    given = [free_port() for _ in range(50)]
    assert len(set(given)) == 50


def test_a_port_that_just_closed_its_connections_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()
    assert why_not("127.0.0.1", port) is None


@needs_ipv6
def test_every_ipv6_address_takes_ipv4_too() -> None:
    with bound_socket("::", 0) as listening:
        listening.listen(1)
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listening.getsockname()[1])).close()
        assert why_not("::1", listening.getsockname()[1]) == "address already in use"


def test_an_address_of_another_machine_says_why() -> None:
    assert why_not("192.0.2.1", 80) == "cannot assign requested address"
