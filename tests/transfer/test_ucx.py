import sys

import pytest

from mesh.errors import ConfigError
from transfer.ucx import UcxTransport, carrier_in, ucx_settings

DESCRIPTION = """
# | ucp_context_0 intra-node cfg#0 | tagged message by ucp_tag_send* from host memory         |
# |                          0..92 | eager short                                | tcp/lo      |
# |                        8K..inf | (?) rendezvous fragmented copy-in copy-out | {lanes} |
"""


@pytest.mark.parametrize(
    ("lanes", "carrier"),
    [("posix/memory", "posix"), ("50% on tcp/eth0 and 50% on tcp/eth1", "tcp"), ("cma/memory and tcp/lo", "cma+tcp")],
)
def test_the_carrier_is_the_transport_of_the_largest_messages(lanes: str, carrier: str) -> None:
    assert carrier_in(DESCRIPTION.format(lanes=lanes)) == carrier


def test_the_carrier_of_gpu_memory_goes_before_that_of_host_memory() -> None:
    gpu = DESCRIPTION.replace("host memory", "cuda/GPU0").format(lanes="cuda_ipc/cuda")
    assert carrier_in(gpu + DESCRIPTION.format(lanes="tcp/lo")) == "cuda_ipc"


def test_a_description_that_says_nothing_is_unknown() -> None:
    assert carrier_in("") == "unknown"


def test_the_environment_of_the_user_stays_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_TCP_TX_SEG_SIZE", "8K")
    settings = ucx_settings("posix")
    assert "TLS" not in settings and "TCP_TX_SEG_SIZE" not in settings
    assert settings["MM_ERROR_HANDLING"] == "y"


def test_transports_that_do_not_exist_are_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"transfer\.transports"):
        UcxTransport("no_such_transport")


def test_without_ucxx_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx._lib", None)
    with pytest.raises(ConfigError, match="install ucxx"):
        UcxTransport(None)
