"""Keys and passwords do not stand where other users of the machine read them."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from cli.settings.check import gateway_keys
from gateway.config import GatewayConfig
from gateway.processes.ledger import Ledger
from gateway.tenants import Tenants
from launcher.composition import compose
from launcher.plan import MeshPlan
from launcher.serving import until_served
from mesh.config_values import load
from mesh.errors import ConfigError, Unauthenticated
from mesh.launch import SETTINGS_VARIABLE
from mesh.rpc.channel import Channels
from tests.support.gateways import running_mesh

KEYS = 'api_keys=[{"name": "alice", "key": "alice-secret"}]'
REDIS = "index.redis_url=redis://:password@127.0.0.1/0"
REDIS_PASSWORD = "index.redis_password=password"


def gateway(*settings: str) -> GatewayConfig:
    return load(GatewayConfig, None, ["scheduler=127.0.0.1:1", *settings])


def test_no_command_line_has_a_key_or_redis_url() -> None:
    settings = (
        f"gateway.{KEYS}",
        f"kvstore.{REDIS}",
        f"kvstore.{REDIS_PASSWORD}",
        "gateway.resume={secret: of all gateways}",
    )
    specs = compose(MeshPlan(None, store_ports=(1,), settings=settings, kv_secret="secret of all workers"))
    words = " ".join(word for spec in specs for word in spec.command(1))
    assert "secret" not in words
    assert "password" not in words
    told = {spec.module: json.loads(spec.environment.get(SETTINGS_VARIABLE, "[]")) for spec in specs}
    assert (told["gateway"], told["kvstore"], told["decode_svc"]) == (
        [KEYS, "resume={secret: of all gateways}"],
        [REDIS, REDIS_PASSWORD],
        ["kv.secret=secret of all workers"],
    )


def test_a_value_can_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("[{name: alice, key: alice-secret}]")
    config = gateway(f"api_keys=@{tmp_path / 'keys'}")
    assert Tenants(config.api_keys, Ledger(["alice"])).authenticate("Bearer alice-secret").name == "alice"
    with pytest.raises(ConfigError, match="No such file"):
        gateway(f"api_keys=@{tmp_path / 'nothing'}")


def test_a_configuration_needs_only_the_digest_of_a_key() -> None:
    digest = sha256(b"alice-secret").hexdigest()
    tenants = Tenants(gateway(f"api_keys=[{{name: alice, key_sha256: {digest}}}]").api_keys, Ledger(["alice"]))
    assert tenants.authenticate("Bearer alice-secret").name == "alice"
    with pytest.raises(Unauthenticated):
        tenants.authenticate(f"Bearer {digest}")


@pytest.mark.parametrize("keys", [{}, {"key": "alice-secret", "key_sha256": "0" * 64}, {"key_sha256": "alice-secret"}])
def test_a_key_is_given_in_one_form(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        gateway("api_keys=" + json.dumps([{"name": "alice", **keys}]))
    assert "alice-secret" not in raised.value.message


async def test_up_waits_for_a_gateway_that_wants_a_key() -> None:
    config = gateway(KEYS)
    async with running_mesh(api_keys=config.api_keys) as mesh:
        endpoint = f"127.0.0.1:{mesh.grpc_port}"
        assert await until_served(endpoint, 1, Channels(), api_key=gateway_keys(config).written)
        with pytest.raises(Unauthenticated):
            await until_served(endpoint, 1, Channels())


def test_no_message_quotes_a_file_of_secrets(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("[{name: alice, key: alice-secret")
    with pytest.raises(ConfigError) as raised:
        gateway(f"api_keys=@{tmp_path / 'keys'}")
    assert "secret" not in raised.value.message
