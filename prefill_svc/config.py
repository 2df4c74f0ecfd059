"""Configuration of a prefill worker."""

from typing import Self

from pydantic import Field, model_validator

from mesh.config import Config
from worker.config import WorkerConfig


class QueueConfig(Config):
    """What waits here at the most; what is over it is placed on another worker."""

    waiting_prompts: int = Field(default=256, ge=0)
    """Prompts beyond those that run at once."""
    queued_tokens: int = Field(default=1_000_000, ge=1)
    """Tokens accepted and not computed; one prompt may exceed it alone."""


class PrefillConfig(WorkerConfig):
    """A prefill worker: prompts, whose KV it pushes to decode workers."""

    queue: QueueConfig = QueueConfig()

    @model_validator(mode="after")
    def _kv_can_leave(self) -> Self:
        if self.engine.transfer is None:
            raise ValueError("engine.transfer is required, to push KV: set engine.transfer={}")
        return self
