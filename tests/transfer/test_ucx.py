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
