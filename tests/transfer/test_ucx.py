import sys
from collections.abc import Callable

import pytest

from mesh.errors import ConfigError
from tests.support.transfer_peer import CONFIG, Peer
from tests.support.waiting import wait_until
from transfer.transport import Arrival
from transfer.ucx import UcxTransport


def test_transports_that_do_not_exist_are_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"transfer\.transports"):
        UcxTransport("no_such_transport")


def test_a_missing_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != "/dev/shm")
    with pytest.raises(ConfigError, match=r"UCX does not start .*, and /dev/shm is missing or cannot be written: "):
        UcxTransport("no_such_transport")


@pytest.mark.parametrize("devices", ["mlx5_0:1", "lo,mlx5_0:1"])
def test_a_device_that_ucx_lacks_is_a_configuration_error(devices: str) -> None:
    # UCX itself starts, with what is left.
    with pytest.raises(ConfigError, match=rf"transfer\.devices={devices}: UCX finds no mlx5_0:1 .* built with verbs"):
        UcxTransport(None, devices)


def test_a_device_of_the_environment_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    with pytest.raises(ConfigError, match="UCX finds no mlx5_0:1"):
        UcxTransport(None, "lo")


def test_without_ucxx_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx._lib", None)
    with pytest.raises(ConfigError, match="install ucxx"):
        UcxTransport(None)


@pytest.mark.parametrize("address", [b"", b"\x90" + bytes(80), b"garbage of some length"])
def test_a_wrong_ucx_address_costs_the_message_not_the_process(address: bytes) -> None:
    transport = UcxTransport("tcp")
    sent = transport.send(address, 1, b"message")
    assert sent.completed and sent.error() == "this is no address of a UCX worker"
    transport.close()


def test_a_connection_that_failed_before_any_answer_is_retried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with Peer(config=CONFIG) as gone:
        dead_address = gone.address()
    sender, receiver = UcxTransport("tcp", "lo"), UcxTransport("tcp", "lo")
    connect = UcxTransport._connect_worker
    reached = iter([dead_address, receiver.address])
    monkeypatch.setattr(UcxTransport, "_connect_worker", lambda self, _: connect(self, next(reached)))
    message, buffer = b"message", bytearray(7)
    sent = sender.send(receiver.address, 5, message)
    arrival = wait_for_arrival(sender, receiver)
    received = receiver.receive(arrival, buffer)
    progress_until(lambda: received.completed and sent.completed, sender, receiver)
    assert (sent.error(), received.error(), arrival.tag, bytes(buffer)) == (None, None, 5, message)
    sender.close()
    receiver.close()


def test_a_message_to_a_dead_peer_fails_after_its_retries() -> None:
    with Peer(config=CONFIG) as gone:
        address = gone.address()
    sender = UcxTransport("tcp", "lo")
    sent = sender.send(address, 5, b"message")
    progress_until(lambda: sent.completed, sender)
    assert sent.error() is not None
    assert not sender.is_reachable(address)
    sender.close()


def wait_for_arrival(*sides: UcxTransport) -> Arrival:
    """At the last of these."""
    arrivals: list[Arrival] = []

    def arrived() -> bool:
        arrivals.extend(arrival for arrival in [sides[-1].next_arrival()] if arrival is not None)
        return bool(arrivals)

    progress_until(arrived, *sides)
    return arrivals[0]


def progress_until(condition: Callable[[], bool], *sides: UcxTransport) -> None:
    def look() -> bool:
        for side in sides:
            side.progress()
        return condition()

    wait_until(look)
