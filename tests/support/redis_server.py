"""A real redis-server with TLS, client certificates and an ACL; the Valkey wheel is built without TLS."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as NotYet

from mesh.config import TlsConfig
from mesh.ports import free_port

BINARY = os.environ.get("REDIS_SERVER") or shutil.which("redis-server")
needs_redis = pytest.mark.skipif(BINARY is None, reason="there is no redis-server (or REDIS_SERVER)")
# The commands that a store needs, as docs/redis.md says.
COMMANDS = [
    *("+eval", "+evalsha", "+time", "+hgetall", "+hget", "+hset", "+hdel", "+smismember", "+scard", "+sadd", "+srem"),
    *("+unlink", "+pexpire", "+select"),
]


@contextmanager
def running_redis(directory: Path, tls: TlsConfig, users: dict[str, tuple[str, list[str]]]) -> Iterator[int]:
    """Run a server; yields its TLS port. users: password and commands of each user by name. No other user may log
    in.
    """
    assert BINARY is not None
    port, config = free_port(), directory / "redis.conf"
    lines = [
        "port 0",
        f"tls-port {port}",
        f"tls-cert-file {tls.certificate}",
        f"tls-key-file {tls.key}",
        f"tls-ca-cert-file {tls.ca}",
        "tls-auth-clients yes",
        'save ""',
        f"dir {directory}",
        "user default off",
        *(f"user {name} on >{word} ~deepmesh:{{kv}}* {' '.join(commands)}" for name, (word, commands) in users.items()),
        "user tester on >tester +ping",
    ]
    config.write_text("\n".join(lines))
    process = subprocess.Popen([BINARY, str(config)], stdout=subprocess.DEVNULL)
    try:
        while not _answers(port, tls):
            assert process.poll() is None, "redis-server ended"
        yield port
    finally:
        process.kill()
        process.wait()


def _answers(port: int, tls: TlsConfig) -> bool:
    with Redis(
        host="localhost",
        port=port,
        username="tester",
        password="tester",
        ssl=True,
        ssl_certfile=str(tls.certificate),
        ssl_keyfile=str(tls.key),
        ssl_ca_certs=str(tls.ca),
    ) as client:
        try:
            return bool(client.ping())
        except NotYet:
            return False
