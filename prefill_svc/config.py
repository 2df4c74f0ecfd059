"""Configuration of a prefill worker."""

from typing import Self

from pydantic import Field, model_validator

from mesh.config import Config
from worker.config import WorkerConfig


class PrefillQueueConfig(Config):
    """Limits of what waits on this worker; prompts beyond them are placed on another worker."""

    waiting_prompts: int = Field(default=256, ge=0)
    """Prompts that wait because the batch is full."""
    queued_tokens: int = Field(default=1_000_000, ge=1)
    """Tokens accepted but not computed yet; a single prompt may exceed the limit if it is alone."""


class PrefillConfig(WorkerConfig):
    """A prefill worker: computes prompts and pushes their KV to decode workers."""

    queue: PrefillQueueConfig = PrefillQueueConfig()

    @model_validator(mode="after")
    def _kv_can_leave(self) -> Self:
        if self.engine.transfer is None:
            raise ValueError("engine.transfer is required, to push KV: set engine.transfer={}")
        return self
