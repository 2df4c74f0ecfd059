"""The address of Redis, and how to log in."""

import ssl
from dataclasses import dataclass
from typing import Self
from urllib.parse import SplitResult, unquote, urlsplit

from mesh.config import RedisConfig, RedisTlsConfig
from mesh.errors import ConfigError

_DEFAULT_PORT = 6379
_WANTED = "redis_url: it must be redis://host:port/database, or rediss:// for TLS"


@dataclass(frozen=True)
class RedisServer:
    """A server, a database in it, and how to log in."""

    host: str
    port: int
    database: int = 0
    # None means the server's default user.
    user: str | None = None
    password: str | None = None
    encrypted: bool = False
    tls: RedisTlsConfig | None = None

    @classmethod
    def of(cls, config: RedisConfig) -> Self:
        """The server that a configuration names. A user or password in the URL overrides the separate keys. Raises
        ConfigError.
        """
        assert config.redis_url is not None
        parts = _split(config.redis_url)
        if parts.scheme not in ("redis", "rediss") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(_WANTED)
        encrypted = parts.scheme == "rediss"
        if config.redis_tls is not None and not encrypted:
            raise ConfigError("redis_tls is for a redis_url that begins with rediss://")
        configured = config.redis_password
        password = parts.password and unquote(parts.password)
        user = unquote(parts.username) if parts.username else config.redis_user
        password = password or (None if configured is None else configured.get_secret_value())
        if user is not None and password is None:
            raise ConfigError("redis_user needs redis_password")
        tls = config.redis_tls if encrypted else None
        server = cls(parts.hostname, _port(parts), _database(parts), user, password, encrypted, tls)
        try:
            server.context()
        except OSError as error:
            raise ConfigError(f"redis_tls: cannot use its files: {error}") from error
        return server

    @property
    def name(self) -> str:
        """Name for messages; contains no secrets."""
        return f"Redis at {self.host}:{self.port}"

    @property
    def login(self) -> tuple[bytes, ...]:
        """The command that logs in; empty if none is needed."""
        if self.password is None:
            return ()
        user = () if self.user is None else (self.user.encode(),)
        return (b"AUTH", *user, self.password.encode())

    def context(self) -> ssl.SSLContext | None:
        """A TLS context; None without TLS. Made anew for each connection, since certificates are renewed. Raises
        OSError.
        """
        if not self.encrypted:
            return None
        tls = self.tls or RedisTlsConfig()
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.certificate is not None:
            context.load_cert_chain(tls.certificate, tls.key)
        return context


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        raise ConfigError(_WANTED) from None


def _port(parts: SplitResult) -> int:
    try:
        return parts.port or _DEFAULT_PORT
    except ValueError:
        raise ConfigError("redis_url: its port is no number up to 65535") from None


def _database(parts: SplitResult) -> int:
    path = parts.path.strip("/")
    if path and not (path.isascii() and path.isdecimal()):
        raise ConfigError("redis_url: what follows the port is the number of a database")
    return int(path or 0)
