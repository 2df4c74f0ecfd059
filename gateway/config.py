"""The gateway's configuration."""

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator

from mesh.config import Config, ServiceConfig


class HttpConfig(Config):
    """Where the OpenAI API listens; 0 picks a free port."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    # Largest request body.
    body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    # For a request's body to arrive.
    body_seconds: float = Field(default=60.0, gt=0)


class ModelConfig(Config):
    """Text for one model. A model that workers serve and that is not listed takes and gives token ids only."""

    # Holds tokenizer.json and tokenizer_config.json; a checkpoint does.
    tokenizer_dir: Path
    # As the workers call it; by default the directory's name.
    name: str | None = None

    @property
    def served_name(self) -> str:
        return self.name or self.tokenizer_dir.resolve().name


class ApiKeyConfig(Config):
    """One tenant."""

    # In logs and metrics.
    name: str = Field(min_length=1)
    key: SecretStr = Field(min_length=8)
    # Keys with the same salt share cached prefixes; by default a key shares with none but itself.
    cache_salt: str | None = None
    # Generations at once; by default as many as the gateway takes.
    max_concurrent: int | None = Field(default=None, ge=1)


class LimitsConfig(Config):
    # Generations at once.
    live_generations: int = Field(default=4096, ge=1)
    # Of a raw or rendered prompt, before it is tokenized.
    prompt_characters: int = Field(default=1_000_000, ge=1)
    # Tokens that a client may leave unread before its generation is cancelled.
    unread_tokens: int = Field(default=4096, ge=1)
    # How long a client may not read at all.
    stalled_seconds: float = Field(default=60.0, gt=0)
    # Of a generation whose client sets no deadline, and of any.
    generation_seconds: float = Field(default=3600.0, gt=0)


class DispatchConfig(Config):
    # Placements of one request: the first, and those after a worker was lost or had no room.
    attempts: int = Field(default=5, ge=1)
    # Before the second attempt; doubled for each further one.
    backoff_seconds: float = Field(default=0.05, gt=0)
    # How long a request whose workers are lost, or that finds none, is placed again, however often: a worker is being
    # started (again). A model is known for as long after its last worker lost its lease, so that requests that arrive
    # then wait too; after that it is unknown, or without workers where `models` lists it.
    worker_seconds: float = Field(default=10.0, ge=0)
    # Of one call to the scheduler.
    place_seconds: float = Field(default=2.0, gt=0)
    # For a worker's first answer on a new stream.
    attach_seconds: float = Field(default=5.0, gt=0)
    # Shortest wait between two tries to reach a worker; doubled up to ten times this.
    reattach_seconds: float = Field(default=0.1, gt=0)


class GatewayConfig(ServiceConfig):
    http: HttpConfig = HttpConfig()
    # Tells this gateway from others, across its restarts; by default the host's name and server.port.
    gateway_id: str | None = None
    # host:port of the scheduler; there is no default, as for workers.
    scheduler: str
    models: tuple[ModelConfig, ...] = ()
    # Where any is set, every call needs one.
    api_keys: tuple[ApiKeyConfig, ...] = ()
    limits: LimitsConfig = LimitsConfig()
    dispatch: DispatchConfig = DispatchConfig()

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        for kind, names in (
            ("models", [model.served_name for model in self.models]),
            ("api_keys", [key.name for key in self.api_keys]),
            ("api_keys.key", [key.key.get_secret_value() for key in self.api_keys]),
        ):
            if len(set(names)) < len(names):
                raise ValueError(f"{kind}: two entries are the same")
        return self
