"""Configuration: frozen models, composed, from YAML and `key=value` overrides. An unknown key fails the start."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_serializer, model_validator
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from mesh.addresses import Host, OwnAddress, is_ipv6, is_loopback
from mesh.config_keys import did_you_mean, key_at, keys_of, model_in
from mesh.errors import ConfigError
from mesh.text_files import read_text

# Kinds of pydantic's errors that are explained by the key's type and bounds alone.
_OF_ANOTHER_KIND = ("greater_than", "less_than", "literal_error", "int_from_float")
_NO_VALUE_OF_ITS_KIND = ("_type", "_parsing")
_OF_ANOTHER_LENGTH = ("too_short", "too_long")


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


ConfigT = TypeVar("ConfigT", bound=Config)


def load(
    model: type[ConfigT],
    path: Path | None = None,
    overrides: Sequence[str] = (),
    origin: str = "configuration",
    overlays: Sequence[Path] = (),
) -> ConfigT:
    """Read `path` (YAML; None means all defaults), lay the files `overlays` over it, apply `overrides`
    ("engine.max_requests=8"), and validate.

    Raises ConfigError naming every wrong key and the source of the values: the files and --set, or `origin` if there is
    no file.
    """
    values = _read(path) if path is not None else {}
    for overlay in overlays:
        _lay_over(values, _read(overlay))
    for override in overrides:
        _apply(values, override)
    if path is not None:
        origin = " with ".join([str(path), *map(str, overlays), *(["--set"] if overrides else [])])
    return validate(model, values, origin)


def overridden(overrides: Sequence[str]) -> dict[str, Any]:
    """The values that these overrides set, as nested dicts. Raises ConfigError for a malformed one."""
    values: dict[str, Any] = {}
    for override in overrides:
        _apply(values, override)
    return values


def validate(model: type[ConfigT], values: Mapping[str, Any], origin: str) -> ConfigT:
    """`values` as a `model`. Raises ConfigError naming `origin` and every offending key."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        # A value with several possible types has an error for each type.
        problems = dict.fromkeys(_in_words(model, each) for each in error.errors(include_input=False))
        raise ConfigError(f"{origin}: {'; '.join(problems)}") from error


def _in_words(model: type[BaseModel], error: ErrorDetails) -> str:
    location, kind, message = error["loc"], error["type"], error["msg"]
    key = ".".join(map(str, location))
    known_key = key_at(model, location)
    if known_key is not None and kind.endswith(_OF_ANOTHER_LENGTH):
        return f"{key}: expected {_length(known_key.is_text, error['ctx'])}"
    if known_key is not None and (kind.startswith(_OF_ANOTHER_KIND) or kind.endswith(_NO_VALUE_OF_ITS_KIND)):
        return f"{known_key.path}: expected {known_key.kind}"
    if known_key is not None and kind == "missing":
        return f"missing key {key}: expected {known_key.kind}"
    if kind == "string_pattern_mismatch" and (examples := _field_at(model, location).examples):
        return f"{key}: expected text such as {examples[0]}"
    if kind != "extra_forbidden":
        # The messages of our own validators name the keys that conflict.
        message = message.removeprefix("Value error, ")
        return f"{key}: {message}" if key else message
    known = [each.path for each in keys_of(model)]
    *parents, _ = location
    model = _model_at(model, parents)
    where = f"of {'.'.join(map(str, parents))} " if parents else ""
    meant = did_you_mean(key, known)
    return f"unknown key {key}{meant}: the keys {where}are {', '.join(sorted(model.model_fields))}"


def _model_at(model: type[BaseModel], location: Sequence[str | int]) -> type[BaseModel]:
    for part in location:
        # A number is an index into a list of models.
        if isinstance(part, str):
            model = model_in(model.model_fields[part].annotation) or model
    return model


def _field_at(model: type[BaseModel], location: Sequence[str | int]) -> FieldInfo:
    *parents, name = location
    return _model_at(model, parents).model_fields[str(name)]


def _length(is_text: bool, bounds: Mapping[str, Any]) -> str:
    """The wrong length in words. The unit depends on the type: pydantic calls a secret's characters items."""
    bound, number = ("at least", bounds["min_length"]) if "min_length" in bounds else ("at most", bounds["max_length"])
    unit = "character" if is_text else "value"
    return f"{bound} {number} {unit}{'' if number == 1 else 's'}"


def _read(path: Path) -> dict[str, Any]:
    values = _in_file(path)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected keys and values at the top level")
    return values


def _lay_over(values: dict[str, Any], others: Mapping[str, Any]) -> None:
    """Set all that `others` has, key by key; a list or a single value replaces the previous one."""
    for key, value in others.items():
        current = values.get(key)
        if isinstance(current, dict) and isinstance(value, dict):
            _lay_over(current, value)
        else:
            values[key] = value


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r}: expected key=value")
    *parents, leaf = key.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ConfigError(f"override of {key}: {parent} holds a value, not keys")
    values[leaf] = _value(key, text)


def _value(key: str, text: str) -> Any:
    """A value in YAML, or read from the file named after an @. No YAML value begins with @. IPv6 addresses need no
    quotes, though YAML takes some for lists.
    """
    if text.startswith("@"):
        return _in_file(Path(text[1:]))
    if is_ipv6(text):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override of {key}: its value is no YAML{_place(error)}") from None


def _in_file(path: Path) -> Any:
    """A value from a file, which keeps it off command lines. It may be a secret, so no message may quote it."""
    try:
        return yaml.safe_load(read_text(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} holds no YAML{_place(error)}") from None


def _place(error: yaml.YAMLError) -> str:
    """Line and column of the error, without the text there: it may be a secret, since secrets come from files too."""
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
