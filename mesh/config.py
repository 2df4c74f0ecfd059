"""Configuration: frozen models, composed. `mesh.config_values` reads their values."""

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_serializer, model_validator
from pydantic.config import JsonDict

from mesh.addresses import Host, OwnAddress, is_loopback

# Marks a key that no user has to know: it is as settable as any other, but no page, help or schema names it.
INTERNAL: JsonDict = {"internal": True}


class Config(BaseModel):
    """Base of every configuration model: frozen, with unknown keys refused and defaults validated."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())


class ServerConfig(Config):
    """Where a service listens."""

    host: Host = "127.0.0.1"
    """Address to listen on; 0.0.0.0 listens on all of the machine's IPv4 addresses, :: on all of both kinds."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 picks a free port."""
    advertise: OwnAddress | None = None
    """host:port at which other services reach this one. By default its host (the machine's name if host means all
    addresses) and the port that it listens on.
    """
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of Prometheus' /metrics over HTTP; null serves no metrics, 0 picks a free port."""
    metrics_host: Host | None = None
    """Address of metrics_port; by default server.host. The port asks for no key."""
    health_port: int | None = Field(default=None, ge=0, le=65535)
    """Port that serves only gRPC health, in plaintext, for probes without a certificate; null serves health on
    server.port.
    """
    max_message_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """Largest gRPC message that is received or sent."""
    max_calls: int = Field(default=8192, ge=1)
    """Calls that may be in progress at once; further ones are refused and told when to retry."""
    drain_seconds: float = Field(default=10.0, ge=0)
    """How long a stopping service waits for its requests to end."""


class ObserveConfig(Config):
    """Logs and traces of a service."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe messages that are logged; DEBUG has every span."""
    log_format: Literal["text", "json"] = "text"
    """Lines for people, or one JSON object a line, with date and time zone."""
    access_log: bool = False
    """Log every generation at its end: tenant, API, model, outcome, lengths and times, but no content."""
    trace_file: Path | None = None
    """File for Chrome trace events of every span (Perfetto opens it); "%p" in its name becomes the process id."""
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://[^/]+$", examples=["http://127.0.0.1:4317"])
    """OpenTelemetry collector that gets the spans of requests, by OTLP over gRPC: "http://127.0.0.1:4317"; it needs
    the extra `deepmesh[otlp]`.
    """
    trace_share: float = Field(default=1.0, ge=0, le=1)
    """Share of requests for which a gateway with otlp_endpoint begins a trace. A client's traceparent overrides it."""


class TlsConfig(Config):
    """PEM files of a service. They are read again when they change."""

    certificate: Path
    """The service's certificate; it names the service."""
    key: Path
    """The certificate's private key."""
    ca: Path
    """The CAs that sign the other services' certificates."""


class SecurityConfig(Config):
    """How services authenticate one another (docs/security.md)."""

    tls: TlsConfig | None = None
    """Mutual TLS: every call between services is encrypted, and both sides show a certificate that names them."""
    plaintext: bool = False
    """Allow plaintext off loopback: if a service mesh encrypts, or if the network has no other users."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.tls is not None and self.plaintext:
            raise ValueError("tls and plaintext exclude each other")
        return self


class RedisTlsConfig(Config):
    """PEM files for TLS with Redis. They are read at each connection."""

    ca: Path | None = None
    """The CAs that may sign Redis' certificate, which must name the URL's host; by default the system's CAs."""
    certificate: Path | None = None
    """Certificate to show if Redis asks for one."""
    key: Path | None = None
    """The certificate's private key; by default it is in the certificate's file."""

    @model_validator(mode="after")
    def _key_has_a_certificate(self) -> Self:
        if self.key is not None and self.certificate is None:
            raise ValueError("a key needs its certificate")
        return self


class RedisConfig(Config):
    """Redis or Valkey: base of the configuration of what a service stores there (docs/redis.md)."""

    redis_url: str | None = None
    """redis://host:port/database, or rediss:// for TLS."""
    redis_user: str | None = Field(default=None, min_length=1)
    """A user of Redis' ACL, if the URL names none; null is Redis' default user."""
    redis_password: SecretStr | None = Field(default=None, min_length=1)
    """That user's password, if the URL has none."""
    redis_tls: RedisTlsConfig | None = None
    """For rediss://: a CA of your own, and a certificate for this service."""
    timeout_seconds: float = Field(default=0.1, gt=0)
    """Longest wait for Redis."""

    @field_serializer("redis_url", when_used="json")
    def _without_login(self, url: str | None) -> str | None:
        """Hide the password in a printed URL, as of any secret."""
        return None if url is None else re.sub(r"//.*@", "//**********@", url)


class ServiceConfig(Config):
    """Base of a service's configuration."""

    server: ServerConfig = ServerConfig()
    observe: ObserveConfig = ObserveConfig()
    security: SecurityConfig = SecurityConfig()

    @property
    def internal_addresses(self) -> tuple[str, ...]:
        """Hosts, or host:port, of the calls between services: where this service listens for them, and whom it
        calls.
        """
        return (self.server.host,)

    @model_validator(mode="after")
    def _is_protected_off_loopback(self) -> Self:
        exposed = [address for address in self.internal_addresses if not is_loopback(address)]
        if exposed and self.security.tls is None and not self.security.plaintext:
            raise ValueError(
                f"{', '.join(exposed)} is not loopback: services must have certificates there (security.tls; "
                "deepmesh certs makes them for development), or security.plaintext=true where the network is "
                "protected by other means, such as a service mesh with its own mTLS"
            )
        return self
