import sys

import pytest

from mesh.errors import ConfigError
from transfer.ucx import UcxTransport


def test_transports_that_do_not_exist_are_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"transfer\.transports"):
        UcxTransport("no_such_transport")


def test_without_ucxx_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx._lib", None)
    with pytest.raises(ConfigError, match="install ucxx"):
        UcxTransport(None)


@pytest.mark.parametrize("address", [b"", b"\x90" + bytes(80), b"garbage of some length"])
def test_an_address_of_no_ucx_worker_costs_the_message_and_not_the_process(address: bytes) -> None:
    transport = UcxTransport("tcp")
    sent = transport.send(address, 1, b"message")
    assert sent.completed and sent.error() == "this is no address of a UCX worker"
    transport.close()
