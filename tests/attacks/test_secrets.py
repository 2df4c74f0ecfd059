"""Keys and passwords do not stand where other users of the machine read them."""

from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from gateway.tenants import Tenants
from mesh.config import load
from mesh.errors import ConfigError


def gateway(*settings: str) -> GatewayConfig:
    return load(GatewayConfig, None, ["scheduler=127.0.0.1:1", *settings])


def test_a_value_can_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("[{name: alice, key: alice-secret}]")
    config = gateway(f"api_keys=@{tmp_path / 'keys'}")
    assert Tenants(config.api_keys).authenticate("Bearer alice-secret").name == "alice"
    with pytest.raises(ConfigError, match="No such file"):
        gateway(f"api_keys=@{tmp_path / 'nothing'}")


def test_no_message_quotes_a_file_of_secrets(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("[{name: alice, key: alice-secret")
    with pytest.raises(ConfigError) as raised:
        gateway(f"api_keys=@{tmp_path / 'keys'}")
    assert "secret" not in raised.value.message
