"""Configuration of a decode worker."""

from pydantic import Field

from engine.config import EngineConfig
from mesh.config import Config, ServiceConfig


class QueueConfig(Config):
    """What waits here at the most; what is over it is placed on another worker."""

    # Requests beyond those that run at once.
    waiting_requests: int = Field(default=1024, ge=0)
    # Prompts accepted and not computed; one request may exceed it alone.
    queued_prefill_tokens: int = Field(default=1_000_000, ge=1)
    # Output that one gateway has not acknowledged; 4 bytes a token, more with log probabilities.
    kept_tokens: int = Field(default=8_000_000, ge=1)


class DecodeConfig(ServiceConfig):
    engine: EngineConfig
    # host:port of the scheduler. The worker serves those who know it while there is none.
    scheduler: str = "127.0.0.1:8002"
    # Unique in the mesh and stable across restarts; by default host:port.
    worker_id: str | None = Field(default=None, min_length=1, max_length=256)
    # How long requests outlive a broken stream.
    grace_seconds: float = Field(default=10.0, ge=0)
    # Least time between two reports to the scheduler.
    status_interval_seconds: float = Field(default=0.05, gt=0)
    queue: QueueConfig = QueueConfig()
