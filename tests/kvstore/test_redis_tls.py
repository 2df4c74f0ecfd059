"""The index in a real Redis over TLS, with a client certificate and a user of its ACL; and what may be wrong."""

import asyncio
import logging
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli.authority import Authority
from kvstore import publisher
from kvstore.directory import BlockDirectory
from kvstore.index import Location
from kvstore.publisher import Publisher
from kvstore.redis_index import RedisIndex
from mesh.config import TlsConfig
from mesh.observe.metrics import KVSTORE_INDEX_FAILURES
from mesh.rpc.identity import Role
from tests.support.certificates import certified
from tests.support.metric_values import value_of
from tests.support.redis_server import COMMANDS, needs_redis, running_redis
from tests.support.valkey import redis_index
from tests.support.waiting import eventually

pytestmark = [pytest.mark.check("redis"), needs_redis]

KEYS = [b"%024d" % number for number in range(100)]
PASSWORD = "right-password"
USERS = {
    "store": COMMANDS,
    "no-lookups": [each for each in COMMANDS if each != "+smismember"],
    "no-scripts": [each for each in COMMANDS if not each.startswith("+eval")],
    "no-changes": [each for each in COMMANDS if each != "+sadd"],
}


@dataclass
class Server:
    port: int
    # Files of a store that it lets in.
    client: TlsConfig

    def settings(self, *, user: str = "store", password: str = PASSWORD, **tls: Path | None) -> dict[str, Any]:
        files = {**self.client.model_dump(), **tls}
        return {"redis_user": user, "redis_password": password, "redis_tls": files, "timeout_seconds": 20.0}

    def url(self, host: str = "localhost") -> str:
        return f"rediss://{host}:{self.port}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("redis")
    own = certified(directory, Role.KVSTORE, "redis", hosts=["localhost"])
    with running_redis(directory, own, {user: (PASSWORD, commands) for user, commands in USERS.items()}) as port:
        yield Server(port, certified(directory, Role.KVSTORE, "store"))


@asynccontextmanager
async def publishing(index: RedisIndex) -> AsyncIterator[None]:
    directory = BlockDirectory(len(KEYS))
    reservation = directory.reserve(None, KEYS)
    assert reservation is not None
    directory.store(reservation.blocks)
    task = asyncio.create_task(Publisher(index, lambda: directory.held, 10.0).run())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_stores_with_a_certificate_and_a_user_share_an_index(server: Server) -> None:
    settings = server.settings()
    async with redis_index(server.url(), "a", **settings) as a, redis_index(server.url(), "b", **settings) as b:
        assert await b.renew() == 0
        async with publishing(a):
            await until_found(b, 100)
        await a.remove(KEYS[50:])
        assert await b.match(KEYS) == Location("a", "1", 50)
        await a.clear()
        assert await b.match(KEYS) is None


async def until_found(index: RedisIndex, blocks: int) -> None:
    for _ in range(1500):
        # It asks those stores that had a lease at its last renewal.
        await index.renew()
        if await index.match(KEYS) == Location("a", "1", blocks):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it was not found in time")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("password", "refuses a command of the user 'store': WRONGPASS"),
        ("user", "refuses a command of the user 'stranger': WRONGPASS"),
        ("no-lookups", "no-lookups.*SMISMEMBER"),
        ("no-scripts", "no-scripts.*eval"),
        ("no-changes", "no-changes.*sadd"),
        ("no certificate", "before its first answer"),
        ("certificate of another CA", "before its first answer"),
        ("other CA", "its certificate is refused .*"),
        ("other name", "its certificate is refused .*IP address mismatch"),
        ("plaintext", "before its first answer"),
        ("no server", "cannot be reached"),
    ],
)
async def test_a_store_that_redis_refuses_warns_once_and_continues(
    server: Server,
    case: str,
    words: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher, "RETRY_SECONDS", 0.01)
    url, settings = server.url(), server.settings()
    stranger = certified(tmp_path, Role.KVSTORE, "stranger", Authority.new(days=1))
    if case == "password":
        settings = server.settings(password="wrong-password")
    elif case == "user":
        settings = server.settings(user="stranger")
    elif case in USERS:
        settings = server.settings(user=case)
    elif case == "no certificate":
        settings = server.settings(certificate=None, key=None)
    elif case == "certificate of another CA":
        settings = server.settings(certificate=stranger.certificate, key=stranger.key)
    elif case == "other CA":
        settings = server.settings(ca=stranger.ca)
        # redis-py would trust the system's CAs as well.
        monkeypatch.setenv("SSL_CERT_FILE", str(server.client.ca))
    elif case == "other name":
        url = server.url("127.0.0.1")
    elif case == "plaintext":
        url, settings = url.replace("rediss", "redis"), {}
    else:
        url = "rediss://localhost:1"
    failures = value_of(KVSTORE_INDEX_FAILURES)
    async with redis_index(url, **settings) as index:
        with caplog.at_level(logging.WARNING):
            async with publishing(index):
                await eventually(lambda: value_of(KVSTORE_INDEX_FAILURES) >= failures + 2)
                assert await index.match(KEYS) is None
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("not publishing to the index: the index does not answer: Redis at ")
    assert re.search(words, record.getMessage()), record.getMessage()
    assert PASSWORD not in record.getMessage()
    assert "wrong-password" not in record.getMessage()


async def test_a_renewed_certificate_is_used_at_the_next_connection(server: Server, tmp_path: Path) -> None:
    files = certified(tmp_path, Role.KVSTORE, "stranger", Authority.new(days=1))
    settings = server.settings(certificate=files.certificate, key=files.key)
    async with redis_index(server.url(), **settings) as index:
        assert await index.match(KEYS) is None
        shutil.copy(server.client.certificate, files.certificate)
        shutil.copy(server.client.key, files.key)
        async with publishing(index):
            await until_found(index, 100)
