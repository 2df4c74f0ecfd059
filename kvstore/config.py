"""Configuration of a KV store."""

from pydantic import Field

from mesh.config import Config, ServiceConfig
from transfer.config import TransferConfig


class IndexConfig(Config):
    # redis://host:port/database, shared by several stores. None: the index is in this process.
    redis_url: str | None = None
    # Longest wait for Redis. A lookup that gets no answer finds nothing.
    timeout_seconds: float = Field(default=0.1, gt=0)
    # A store that died is believed to hold its blocks for so long.
    lease_seconds: float = Field(default=10.0, ge=0.5)


class KvStoreConfig(ServiceConfig):
    # Unique in the mesh and stable across restarts; by default host:port.
    store_id: str | None = Field(default=None, min_length=1, max_length=256)
    # Memory for KV blocks. The machine gives it as they fill.
    memory_bytes: int = Field(default=1 << 30, ge=1 << 16)
    # A worker that does not renew its session for this long is detached.
    session_seconds: float = Field(default=10.0, gt=0)
    max_sessions: int = Field(default=1024, ge=1)
    # How long a worker may take to push what it offered.
    offer_seconds: float = Field(default=30.0, gt=0)
    index: IndexConfig = IndexConfig()
    transfer: TransferConfig = TransferConfig()
