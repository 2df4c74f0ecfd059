"""Configuration of a decode worker."""

from typing import Self

from pydantic import Field, model_validator

from mesh.config import INTERNAL, Config
from worker.config import WorkerConfig


class DecodeQueueConfig(Config):
    """Limits of what waits on this worker; requests beyond them are placed on another worker."""

    waiting_requests: int = Field(default=1024, ge=0)
    """Requests that wait because the batch is full."""
    queued_prefill_tokens: int = Field(default=1_000_000, ge=1)
    """Prompt tokens accepted but not computed yet; a single request may exceed the limit if it is alone."""
    kept_tokens: int = Field(default=8_000_000, ge=1, json_schema_extra=INTERNAL)
    """Output tokens that one gateway has not acknowledged; 4 bytes a token, more with log probabilities."""


class DecodeConfig(WorkerConfig):
    """A decode worker: requests from acceptance to their last token."""

    can_prefill: bool = True
    """Whether it computes the prompts of requests that have no prefill worker."""
    grace_seconds: float = Field(default=10.0, ge=0, json_schema_extra=INTERNAL)
    """How long requests outlive a broken stream."""
    log_seconds: float = Field(default=60.0, ge=0)
    """How long a request's output is kept after its end, for clients that resume it through another gateway."""
    queue: DecodeQueueConfig = DecodeQueueConfig()

    @model_validator(mode="after")
    def _kv_can_come_from_elsewhere(self) -> Self:
        if self.engine.transfer is None and (self.stores or not self.can_prefill):
            raise ValueError("engine.transfer is required with stores, or without can_prefill: set engine.transfer={}")
        return self
