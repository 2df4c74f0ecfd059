"""Configuration of a KV store."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from mesh.config import INTERNAL, Config, RedisConfig, ServiceConfig
from transfer.config import TransferConfig


class IndexConfig(RedisConfig):
    """Records which store holds which blocks, as hints for placement."""

    redis_url: str | None = None
    """redis://host:port/database (rediss:// for TLS), shared by several stores; null keeps the index in this process.
    """
    timeout_seconds: float = Field(default=0.1, gt=0)
    """Longest wait for Redis. A lookup without an answer finds nothing."""
    lease_seconds: float = Field(default=10.0, ge=0.5)
    """How long a dead store still counts as holding its blocks."""


class DiskConfig(Config):
    """A second tier of blocks, on disk."""

    path: Path | None = None
    """Directory for the store's file, preferably on a disk of its own; null keeps blocks in memory only."""
    bytes: int = Field(default=16 << 30, ge=1 << 20)
    """Size of the file. It is allocated at the start."""
    least_uses: int = Field(default=1, ge=0)
    """A block is written to disk once it was fetched, or offered again, this many times; 0 writes every block."""
    threads: int = Field(default=8, ge=1, le=64)
    """Most reads at a time."""


class QuotaConfig(Config):
    """How much of a store one tenant may use. A tenant is the holder of an API key; all clients without a key are one
    tenant.
    """

    memory_bytes: int | None = Field(default=None, ge=0)
    """KV in memory; null is no limit. A tenant that reaches it makes room with its own blocks."""
    disk_bytes: int | None = Field(default=None, ge=0)
    """KV on disk; null is no limit."""


class TenantConfig(QuotaConfig):
    """A tenant with its own quota."""

    name: str = Field(min_length=1)
    """The tenant's name, as in the gateways' API keys."""


class KvStoreConfig(ServiceConfig):
    """A KV store: keeps blocks in addition to the workers' own."""

    store_id: str | None = Field(default=None, min_length=1, max_length=256)
    """Unique in the mesh and stable across restarts; by default host:port."""
    memory_bytes: int | None = Field(default=None, ge=1 << 16)
    """Memory for KV blocks. The machine provides it as the blocks fill. By default `memory_share`."""
    memory_share: float = Field(default=0.25, gt=0, le=1)
    """Share of the memory that is available when the first worker attaches (of the container's limit, if that is
    lower). `memory_bytes` overrides it.
    """
    draft_layers: int | None = Field(default=None, ge=0)
    """Each block has room for the KV of this many draft layers, besides the model's layers. By default as many as the
    first worker to attach has. Base layers of all workers are kept.
    """
    session_seconds: float = Field(default=10.0, gt=0)
    """A worker that does not renew its session for this long is detached."""
    disk: DiskConfig = DiskConfig()
    quota: QuotaConfig = QuotaConfig()
    """The quota of every tenant that is not listed in `tenants`."""
    tenants: tuple[TenantConfig, ...] = ()
    """Tenants with their own quotas. A value that is not set means no limit, whatever `quota` says."""
    max_sessions: int = Field(default=1024, ge=1, json_schema_extra=INTERNAL)
    """Workers that may be attached at once."""
    offer_seconds: float = Field(default=30.0, gt=0, json_schema_extra=INTERNAL)
    """How long a worker may take to push the blocks that it offered."""
    index: IndexConfig = IndexConfig()
    transfer: TransferConfig = TransferConfig()

    @model_validator(mode="after")
    def _names_no_tenant_twice(self) -> Self:
        names = [tenant.name for tenant in self.tenants]
        if len(set(names)) < len(names):
            raise ValueError("tenants has a name twice")
        return self
