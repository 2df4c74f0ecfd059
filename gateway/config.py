"""The gateway's configuration."""

from hashlib import sha256
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from mesh.addresses import Addresses, Host, split_addresses
from mesh.config import INTERNAL, Config, RedisConfig, ServerConfig, ServiceConfig
from mesh.domain.shares import MAX_WEIGHT, MIN_WEIGHT


class HttpConfig(Config):
    """The OpenAI API over HTTP."""

    host: Host = "127.0.0.1"
    """Address to listen on; 0.0.0.0 listens on all of the machine's IPv4 addresses, :: on all of both kinds."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 picks a free port."""
    body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    """Largest request body. In 8 MiB a prompt of 1,000,000 characters (`limits.prompt_characters`) fits, escaped too,
    unless most of them are escaped emoji. A shorter body is refused as well if it has more lists, objects, keys or
    numbers than can be decoded in 0.1 s, for which it would hold up other requests.
    """
    body_seconds: float = Field(default=60.0, gt=0, json_schema_extra=INTERNAL)
    """How long a request's body may take to arrive."""
    header_seconds: float = Field(default=10.0, gt=0)
    """How long a request's headers may take to arrive, counted from the start of the connection or from their first
    byte.
    """
    keep_alive_seconds: int = Field(default=75, ge=1)
    """How long an idle connection is kept after an answer. It should be longer than clients keep theirs, so that the
    client closes first.
    """
    connections: int | None = Field(default=None, ge=1)
    """Most connections at a time. A further one replaces the connection that has been idle for longest, or has not sent
    its request's whole body for longest; if none is so, it is answered 503. By default three quarters of the files that
    the process may open in addition to its own.
    """
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """What happens to a request with fields that we do not know: it is refused, or the fields are ignored and named in
    the answer's header x-deepmesh-ignored-fields.
    """
    cors_origins: tuple[str, ...] = ()
    """Origins (https://example.com, or * for all) whose pages may call the API from a browser; by default none may. A
    gateway without `api_keys` that listens on this machine alone may also be called by their names.
    """


class GatewayServerConfig(ServerConfig):
    """Where the gateway listens for gRPC."""

    max_message_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    """Largest gRPC message that is received or sent. 4 MiB hold any prompt of 1,000,000 characters
    (`limits.prompt_characters`).
    """


class ModelConfig(Config):
    """Tokenizer and chat template of one model. A model without an entry here takes and gives token ids only."""

    tokenizer_dir: Path
    """Directory with tokenizer.json and tokenizer_config.json, such as a checkpoint's."""
    name: str | None = None
    """The model's name as its workers report it; by default the directory's name."""

    @property
    def served_name(self) -> str:
        return self.name or self.tokenizer_dir.resolve().name


class ApiKeyConfig(Config):
    """One API key, and the tenant that holds it."""

    name: str = Field(min_length=1)
    """Name of the tenant in logs and metrics."""
    key: SecretStr | None = Field(default=None, min_length=8)
    """The secret that clients send, as "Authorization: Bearer KEY". Where others may read the configuration, give
    key_sha256 instead.
    """
    key_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$", examples=[64 * "0"])
    """The key's SHA-256 in hexadecimal, as sha256sum prints it. A key must be random: openssl rand -hex 32."""
    cache_salt: str | None = None
    """Keys with the same salt share cached prefixes; by default a key shares them with no other."""
    weight: float = Field(default=1.0, ge=MIN_WEIGHT, le=MAX_WEIGHT)
    """The key's share of a full mesh, relative to other keys' weights. A key that is alone may use all of it."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Requests that the key may make in a minute, all at once or spread; by default any number. Each gateway counts
    requests, tokens and generations by itself, so with several gateways the key has each limit at every gateway. The
    processes of one gateway count together.
    """
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens of prompts and answers in a minute. An answer that exceeds the limit is completed; the key then waits
    until the excess is made up for.
    """
    max_concurrent: int | None = Field(default=None, ge=1)
    """Generations that the key may have at once; by default only the gateway's own limit applies."""

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key."""
        if self.key is not None:
            return sha256(self.key.get_secret_value().encode()).digest()
        assert self.key_sha256 is not None
        return bytes.fromhex(self.key_sha256)

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.key is None) == (self.key_sha256 is None):
            raise ValueError(f"{self.name}: give either key or key_sha256")
        return self


class LimitsConfig(Config):
    """What one request may ask for, and how long its client may take."""

    live_generations: int = Field(default=4096, ge=1)
    """Generations that may be live at once."""
    prompt_characters: int = Field(default=1_000_000, ge=1)
    """Most characters of a raw or rendered prompt, before it is tokenized; also the most ids of a prompt of token
    ids.
    """
    unread_tokens: int = Field(default=4096, ge=1)
    """Tokens that a client may leave unread before its generation is cancelled."""
    messages_per_second: float = Field(default=5000.0, gt=0, le=1_000_000)
    """Messages with tokens per second, to all clients together: they are a gateway's largest cost. A stream sends at
    most one within `live generations / messages_per_second` seconds (with 256 live generations up to 51 ms, with 64 up
    to 13 ms); tokens that arrive sooner share a message. If other processes leave the gateway only a part of a core, it
    sends that much less, down to a quarter. The end of an answer never waits.
    """
    stalled_seconds: float = Field(default=60.0, gt=0)
    """A client that reads nothing for this long is dropped."""
    generation_seconds: float = Field(default=3600.0, gt=0)
    """Longest time that a generation may take, whatever deadline its client sets."""


class DispatchConfig(Config):
    """How a request finds its worker, and another one if that is lost."""

    attempts: int = Field(default=5, ge=1)
    """How often a request is placed: once at first, and again after a worker was lost or had no room."""
    backoff_seconds: float = Field(default=0.05, gt=0, json_schema_extra=INTERNAL)
    """Pause before the second attempt; doubled for each further one."""
    worker_seconds: float = Field(default=10.0, ge=0)
    """How long a request is placed again if its workers are lost or it finds none, regardless of `attempts`: a worker
    may be starting. A model stays known for as long after its last worker lost its lease, so that requests that arrive
    then wait too. After that it is unknown, or a model without workers if `models` lists it. For a scheduler requests
    wait as long, but 10 s at most.
    """
    answer_seconds: float = Field(default=0.05, gt=0)
    """Longest time that a scheduler may take to place a request. If it takes longer, another scheduler, or the gateway
    itself by the last snapshot of the registry, places requests until this one answers again.
    """
    place_seconds: float = Field(default=2.0, gt=0, json_schema_extra=INTERNAL)
    """Timeout of a call to the scheduler if the gateway has neither another scheduler nor a usable snapshot to place
    from.
    """
    attach_seconds: float = Field(default=5.0, gt=0, json_schema_extra=INTERNAL)
    """How long a worker may take for its first answer on a new stream."""
    reattach_seconds: float = Field(default=0.1, gt=0, json_schema_extra=INTERNAL)
    """Pause before a broken stream is opened again; doubled for each failure, up to ten times this."""


class ResumeConfig(Config):
    """How clients resume a stream whose gateway is gone."""

    secret: SecretStr | None = Field(default=None, min_length=16)
    """Secret that seals the names of streams; the same for every gateway of the mesh, best read from a file or the
    environment. By default a random one: then only the gateway that began a stream can resume it.
    """
    seconds: float = Field(default=3600.0, gt=0)
    """How long after a stream began its token can be used."""


class ResponsesConfig(RedisConfig):
    """Responses of /v1/responses that are stored, for requests that go on from them (previous_response_id)."""

    redis_url: str | None = None
    """redis://host:port/database (rediss:// for TLS), the same for every gateway of the mesh; null stores none."""
    timeout_seconds: float = Field(default=0.5, gt=0)
    """Longest wait for Redis. If a response cannot be stored, its client gets it anyway, with store: false."""
    seconds: float = Field(default=30 * 24 * 3600.0, gt=0, le=10 * 365 * 24 * 3600.0)
    """How long a response is stored; by default for 30 days, as OpenAI does."""
    bytes: int = Field(default=1 << 20, ge=1024)
    """Largest conversation that is stored, in bytes of JSON without the answer itself. The total of all conversations
    is bounded by Redis (its maxmemory).
    """


class PublicTlsConfig(Config):
    """PEM files of the certificate that gRPC clients see. Clients need no certificate; they have API keys."""

    certificate: Path
    """The certificate; it must name the host that clients call."""
    key: Path
    """The certificate's private key."""


class GatewayConfig(ServiceConfig):
    """The gateway: clients' requests over gRPC and OpenAI HTTP."""

    server: GatewayServerConfig = GatewayServerConfig()
    public_tls: PublicTlsConfig | None = None
    """TLS of server.port; null is plaintext, for loopback or behind a proxy that terminates TLS."""
    http: HttpConfig = HttpConfig()
    gateway_id: str | None = None
    """Identifies this gateway to workers, across its restarts; by default the host's name and server.port."""
    scheduler: Addresses
    """host:port of the scheduler; like a worker's, it has no default. Several are separated by commas; the gateway uses
    whichever answers.
    """
    processes: int = Field(default=1, ge=1, le=64)
    """Number of processes that serve the gateway's ports together; each uses at most one core. They count API keys'
    quotas together, and each takes its part of `limits.live_generations`. The kernel spreads connections over them, so
    one process serves all requests of a client with one connection.
    """
    models: tuple[ModelConfig, ...] = ()
    sampling_defaults: Literal["checkpoint", "api"] = "checkpoint"
    """Where temperature, top_p, top_k, min_p and repetition_penalty come from if a request says nothing: from the
    checkpoint's generation_config.json (in `models.tokenizer_dir`), or from the API (temperature 1; over gRPC 0).
    """
    api_keys: tuple[ApiKeyConfig, ...] = ()
    """API keys. If there are any, every call needs one."""
    balancer_seconds: float = Field(default=2.0, ge=0)
    """How long a stopping gateway still takes requests after it has reported that it is not ready, so that load
    balancers and probes notice in time. After that, open requests have `server.drain_seconds` to end.
    """
    limits: LimitsConfig = LimitsConfig()
    dispatch: DispatchConfig = DispatchConfig()
    resume: ResumeConfig = ResumeConfig()
    responses: ResponsesConfig = ResponsesConfig()

    @property
    def internal_addresses(self) -> tuple[str, ...]:
        # Only the scheduler: the gateway's own port is for clients.
        return split_addresses(self.scheduler)

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        for kind, names in (
            ("models", [model.served_name for model in self.models]),
            ("api_keys", [key.name for key in self.api_keys]),
            ("api_keys.key", [key.digest for key in self.api_keys]),
        ):
            if len(set(names)) < len(names):
                raise ValueError(f"{kind}: two entries are the same")
        return self
