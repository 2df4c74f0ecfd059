"""Where Redis is and how to log in, as a configuration says it."""

from typing import Any

import pytest

from mesh.config import RedisConfig
from mesh.errors import ConfigError
from mesh.redis_server import RedisServer


def server(url: str, **settings: Any) -> RedisServer:
    return RedisServer.of(RedisConfig.model_validate({"redis_url": url, **settings}))


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost",
        "redis://",
        "redis://h:70000",
        "redis://h/x",
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
    assert (found.login, found.host, found.port, found.database) == ((b"AUTH", b"us@er", b"p:w"), "host", 7, 3)
    assert "p:w" not in found.name


def test_a_password_in_the_url_is_not_printed() -> None:
    printed = RedisConfig(redis_url="redis://user:p@ss/xyz@host:7/3").model_dump_json()
    assert "redis://**********@host:7/3" in printed
    assert "xyz" not in printed


def test_user_and_password_may_stand_beside_the_url() -> None:
    assert server("redis://host", redis_user="store", redis_password="secret").login == (b"AUTH", b"store", b"secret")
    assert server("redis://host", redis_password="secret").login == (b"AUTH", b"secret")
    assert server("redis://host").login == ()


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
