import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from engine.exchange.reach import check_reach, gloo_address, most_cut_off
from mesh.errors import EngineFailed, MeshError, RankLost


def found(addresses: list[str]) -> list[type[MeshError] | None]:
    """What hosts at these addresses raise, in order."""
    store = HashStore()

    def act(host: int) -> type[MeshError] | None:
        try:
            check_reach(store, host, len(addresses), addresses[host])
        except (RankLost, EngineFailed) as error:
            assert "the worker's host at 127.0.0.1 does not reach the one at 127.0.0.1%none" in error.message
            return type(error)
        return None

    with ThreadPoolExecutor(len(addresses)) as pool:
        return list(pool.map(act, range(len(addresses))))


def test_hosts_that_reach_each_other_go_on() -> None:
    assert found(["127.0.0.1"] * 3) == [None] * 3


def test_the_host_at_a_wrong_address_is_cut_off() -> None:
    assert found(["127.0.0.1", "127.0.0.1%none", "127.0.0.1"]) == [RankLost, EngineFailed, RankLost]


@pytest.mark.parametrize(
    "cut, host",
    [([(1, 2)], 2), ([(1, 2), (2, 1), (1, 3)], 1), ([(0, 1)], 1), ([(0, 1), (2, 0)], 2)],
    ids=["the last", "that which two miss", "not the first", "not the first, of two"],
)
def test_the_host_with_most_missing_connections_is_cut_off(cut: list[tuple[int, int]], host: int) -> None:
    assert most_cut_off(cut) == host


def test_the_address_is_that_of_the_named_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert gloo_address() == "127.0.0.1"


@pytest.mark.parametrize("name, address", [("192.0.2.1", "127.0.0.1"), ("127.0.0.9", "127.0.0.9")])
def test_an_address_of_another_machine_is_not_taken(name: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert gloo_address() == address
