"""Where Redis is and how to log in, as a configuration says it."""

import ssl
from pathlib import Path
from typing import Any

import pytest

from cli.authority import Authority
from mesh.config import RedisConfig, RedisTlsConfig
from mesh.errors import ConfigError
from mesh.redis.server import RedisServer, tls_context
from mesh.rpc.identity import Role
from tests.support.certificates import certified


def server(url: str, **settings: Any) -> RedisServer:
    return RedisServer.of(RedisConfig.model_validate({"redis_url": url, **settings}))


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost",
        "redis://",
        "redis://h:70000",
        "redis://h/x",
        "redis://h/-1",
        "redis://h?ssl=no",
        "localhost:6379",
        "redis://[::1",
    ],
)
def test_a_url_that_is_none_of_redis_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="redis_url"):
        server(url)


def test_a_url_may_have_user_and_password_with_any_character() -> None:
    found = server("redis://us%40er:p%3Aw@host:7/3", redis_user="other", redis_password="other")
    assert (found.user, found.password, found.host, found.port, found.database) == ("us@er", "p:w", "host", 7, 3)
    assert "p:w" not in f"{found} {found.name}"


def test_a_password_in_the_url_is_not_printed() -> None:
    printed = RedisConfig(redis_url="redis://user:p@ss/xyz@host:7/3").model_dump_json()
    assert "redis://**********@host:7/3" in printed
    assert "xyz" not in printed


def test_user_and_password_may_have_their_own_keys() -> None:
    found = server("redis://host", redis_user="store", redis_password="secret")
    assert (found.user, found.password) == ("store", "secret")
    found = server("redis://host", redis_password="secret")
    assert (found.user, found.password) == (None, "secret")


def test_own_cas_replace_those_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = certified(tmp_path, Role.KVSTORE, "store")
    system = certified(tmp_path, Role.KVSTORE, "stranger", Authority.new(days=1))
    monkeypatch.setenv("SSL_CERT_FILE", str(system.ca))
    [trusted] = tls_context(RedisTlsConfig(ca=own.ca)).get_ca_certs(binary_form=True)
    assert trusted == ssl.PEM_cert_to_DER_cert(own.ca.read_text())


@pytest.mark.parametrize(
    ("url", "settings", "key"),
    [
        ("redis://host", {"redis_tls": {}}, "redis_tls"),
        ("redis://host", {"redis_user": "store"}, "redis_password"),
        ("rediss://host", {"redis_tls": {"ca": "/nowhere/ca.pem"}}, "redis_tls"),
    ],
)
def test_settings_that_do_not_fit_are_refused_at_the_start(url: str, settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        server(url, **settings)
