"""The address of Redis, and how to log in."""

import ssl
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import SplitResult, unquote, urlsplit

from mesh.addresses import with_port
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
    password: str | None = field(default=None, repr=False)
    # None means plaintext.
    tls: RedisTlsConfig | None = None

    @classmethod
    def of(cls, config: RedisConfig) -> Self:
        """The server that a configuration names. A user or password in the URL overrides the separate keys. Raises
        ConfigError.
        """
        assert config.redis_url is not None
        parts, host, port, database = _address(config.redis_url)
        encrypted = parts.scheme == "rediss"
        if config.redis_tls is not None and not encrypted:
            raise ConfigError("redis_tls is for a redis_url that begins with rediss://")
        configured = config.redis_password
        password = parts.password and unquote(parts.password)
        user = unquote(parts.username) if parts.username else config.redis_user
        password = password or (None if configured is None else configured.get_secret_value())
        if user is not None and password is None:
            raise ConfigError("redis_user needs redis_password")
        tls = config.redis_tls or RedisTlsConfig() if encrypted else None
        try:
            if tls is not None:
                tls_context(tls)
        except OSError as error:
            raise ConfigError(f"redis_tls: cannot use its files: {error}") from error
        return cls(host, port, database, user, password, tls)

    @property
    def name(self) -> str:
        """Name for messages; contains no secrets."""
        return f"Redis at {with_port(self.host, self.port)}"


def tls_context(tls: RedisTlsConfig) -> ssl.SSLContext:
    """A context that trusts the configured CAs, or the system's if there are none. Raises OSError."""
    context = ssl.create_default_context(cafile=tls.ca)
    if tls.certificate is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    return context


def _address(url: str) -> tuple[SplitResult, str, int, int]:
    """The URL's parts, and of them host, port and database. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        port, database = parts.port or _DEFAULT_PORT, int(parts.path.strip("/") or 0)
    except ValueError:
        raise ConfigError(_WANTED) from None
    host = parts.hostname
    if parts.scheme not in ("redis", "rediss") or not host or database < 0 or parts.query or parts.fragment:
        raise ConfigError(_WANTED)
    return parts, host, port, database
