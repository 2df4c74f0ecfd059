"""The gateway's configuration."""

from hashlib import sha256
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from mesh.addresses import split_addresses
from mesh.config import Config, RedisConfig, ServiceConfig
from mesh.domain.shares import MAX_WEIGHT, MIN_WEIGHT


class HttpConfig(Config):
    """The OpenAI API over HTTP."""

    host: str = "127.0.0.1"
    """Address to listen on: 0.0.0.0 is every one of the machine."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 picks a free port."""
    body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """Largest request body."""
    body_seconds: float = Field(default=60.0, gt=0)
    """How long a request's body may take to arrive."""
    header_seconds: float = Field(default=10.0, gt=0)
    """How long a request's headers may take to arrive, from the connection's begin or from their first byte."""
    keep_alive_seconds: int = Field(default=75, ge=1)
    """How long a connection is kept after an answer; longer than clients keep theirs, so that they close and not we."""
    connections: int | None = Field(default=None, ge=1)
    """Connections at the most: another takes the place of the one that asked for nothing for longest, or is answered
    503. By default three quarters of the files that the process may open.
    """
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """Fields of a request that we do not know: the request is refused, or they are left out and named in the header
    x-deepmesh-ignored-fields of the answer.
    """
    cors_origins: tuple[str, ...] = ()
    """Origins (https://example.com, or * for all) whose pages may call the API from a browser; by default none may."""


class ModelConfig(Config):
    """Tokenizer and chat template of one model. A model without an entry here takes and gives token ids only."""

    tokenizer_dir: Path
    """Directory with tokenizer.json and tokenizer_config.json, such as a checkpoint's."""
    name: str | None = None
    """The model's name as its workers give it; by default the directory's name."""

    @property
    def served_name(self) -> str:
        return self.name or self.tokenizer_dir.resolve().name


class ApiKeyConfig(Config):
    """One API key, and the tenant that holds it."""

    name: str = Field(min_length=1)
    """Names the tenant in logs and metrics."""
    key: SecretStr | None = Field(default=None, min_length=8)
    """What its holder sends. Where others may read the configuration, give key_sha256 instead."""
    key_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """The key's SHA-256 in hexadecimal, as sha256sum prints it. A key must be random: openssl rand -hex 32."""
    """What clients send: "Authorization: Bearer KEY"."""
    cache_salt: str | None = None
    """Keys with the same salt share cached prefixes; by default a key shares them with no other."""
    weight: float = Field(default=1.0, ge=MIN_WEIGHT, le=MAX_WEIGHT)
    """The key's part of a full mesh, relative to other keys'. A key that is alone may use all of it."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Requests that the key may make in a minute, all at once or spread; by default any number. Each gateway counts for
    itself, as it does tokens and generations: with several, a key may make as many at each. Processes of one gateway
    count together.
    """
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens of prompts and answers in a minute. An answer that exceeds them is completed, and paid off by waiting."""
    max_concurrent: int | None = Field(default=None, ge=1)
    """Generations that the key may have at once; by default only the gateway's own limit holds."""

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
    """Characters of a raw or rendered prompt, before it is tokenized."""
    unread_tokens: int = Field(default=4096, ge=1)
    """Tokens that a client may leave unread before its generation is cancelled."""
    messages_per_second: float = Field(default=5000.0, gt=0, le=1_000_000)
    """Messages with tokens, to all clients together: they cost a gateway more than anything else. A stream sends no
    second one within `live generations / messages_per_second` seconds (with 256 up to 51 ms, with 64 up to 13 ms):
    tokens that come sooner share one. A gateway that gets only a part of a core, because others want it too, sends
    fewer in proportion, down to a quarter. Ends of answers never wait.
    """
    stalled_seconds: float = Field(default=60.0, gt=0)
    """A client that reads nothing for this long is given up."""
    generation_seconds: float = Field(default=3600.0, gt=0)
    """Longest time that a generation may take, whatever deadline its client sets."""


class DispatchConfig(Config):
    """How a request finds its worker, and another one if that is lost."""

    attempts: int = Field(default=5, ge=1)
    """How often a request is placed: at first, and again after a worker was lost or had no room."""
    backoff_seconds: float = Field(default=0.05, gt=0)
    """Pause before the second attempt; doubled for each further one."""
    worker_seconds: float = Field(default=10.0, ge=0)
    """How long a request whose workers are lost, or that finds none, is placed again, however often: a worker is being
    started (again). A model is known for as long after its last worker lost its lease, so that requests that arrive
    then wait too. After that it is unknown, or a model without workers if `models` lists it.
    """
    answer_seconds: float = Field(default=0.05, gt=0)
    """A scheduler that takes longer than this to place a request is done without, from the last snapshot of its
    registry, until it answers again.
    """
    place_seconds: float = Field(default=2.0, gt=0)
    """Timeout of a call to the scheduler that nothing can be done without."""
    attach_seconds: float = Field(default=5.0, gt=0)
    """How long a worker may take for its first answer on a new stream."""
    reattach_seconds: float = Field(default=0.1, gt=0)
    """Pause before a broken stream is opened again; doubled for each failure, up to ten times this."""


class ResumeConfig(Config):
    """How clients go on with a stream whose gateway is gone."""

    secret: SecretStr | None = Field(default=None, min_length=16)
    """Seals the names of streams; the same for every gateway of the mesh, at best from a file or the environment. By
    default a random one: then only the gateway that began a stream goes on with it.
    """
    seconds: float = Field(default=3600.0, gt=0)
    """How long a stream's token may be shown after the stream began."""


class ResponsesConfig(RedisConfig):
    """Responses of /v1/responses that are stored, for requests that go on from them (previous_response_id)."""

    redis_url: str | None = None
    """redis://host:port/database (rediss:// for TLS), the same for every gateway of the mesh; null stores none."""
    timeout_seconds: float = Field(default=0.5, gt=0)
    """Longest wait for Redis. A response that cannot be stored is given all the same, with store: false."""
    seconds: float = Field(default=30 * 24 * 3600.0, gt=0, le=10 * 365 * 24 * 3600.0)
    """How long a response is stored; by default for 30 days, as OpenAI does."""
    bytes: int = Field(default=1 << 20, ge=1024)
    """Largest conversation that is stored: what was said before the answer, as JSON. Redis bounds them all together
    (its maxmemory).
    """


class PublicTlsConfig(Config):
    """PEM files that gRPC's clients are shown. Clients need no certificate; they have API keys."""

    certificate: Path
    """Shown to clients; it names the host that they call."""
    key: Path
    """The certificate's private key."""


class GatewayConfig(ServiceConfig):
    """The gateway: clients' requests over gRPC and OpenAI HTTP."""

    public_tls: PublicTlsConfig | None = None
    """TLS of server.port; null is plaintext, for loopback or behind a proxy that ends TLS."""
    http: HttpConfig = HttpConfig()
    gateway_id: str | None = None
    """Identifies this gateway to workers, across its restarts; by default the host's name and server.port."""
    scheduler: str
    """host:port of the scheduler; there is no default, as for workers. Several are separated by commas: the gateway
    uses whichever answers.
    """
    processes: int = Field(default=1, ge=1, le=64)
    """Processes that serve the gateway's ports together: one uses one core. They count API keys' quotas together, and
    each takes its part of `limits.live_generations`. The kernel deals connections out among them, so a client with one
    connection is served by one process.
    """
    models: tuple[ModelConfig, ...] = ()
    api_keys: tuple[ApiKeyConfig, ...] = ()
    """If there are any, every call needs one."""
    balancer_seconds: float = Field(default=2.0, ge=0)
    """How long a stopping gateway that is not ready any more takes requests all the same, so that balancers and
    probes see it first. After that requests have `server.drain_seconds` to end.
    """
    limits: LimitsConfig = LimitsConfig()
    dispatch: DispatchConfig = DispatchConfig()
    resume: ResumeConfig = ResumeConfig()
    responses: ResponsesConfig = ResponsesConfig()

    @property
    def internal_addresses(self) -> tuple[str, ...]:
        # What it listens on is for clients.
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
