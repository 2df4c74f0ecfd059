"""Configuration of a KV store."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from mesh.config import Config, RedisConfig, ServiceConfig
from transfer.config import TransferConfig


class IndexConfig(RedisConfig):
    """Who holds which blocks, for hints to placement."""

    redis_url: str | None = None
    """redis://host:port/database (rediss:// for TLS), shared by several stores; null keeps it in this process."""
    timeout_seconds: float = Field(default=0.1, gt=0)
    """Longest wait for Redis. A lookup that gets no answer finds nothing."""
    lease_seconds: float = Field(default=10.0, ge=0.5)
    """How long a store that died is still believed to hold its blocks."""


class DiskConfig(Config):
    """Blocks on disk, behind those in memory."""

    path: Path | None = None
    """Directory for the store's file, on a disk of its own at best; null keeps blocks in memory alone."""
    bytes: int = Field(default=16 << 30, ge=1 << 20)
    """Size of the file, which is taken at once."""
    least_uses: int = Field(default=1, ge=0)
    """A block is written once it has been fetched, or offered again, this many times; 0 writes every block."""
    threads: int = Field(default=4, ge=1, le=64)
    """Reads at a time."""


class QuotaConfig(Config):
    """How much of a store one tenant may have: an API key's holder, or all who need no key."""

    memory_bytes: int | None = Field(default=None, ge=0)
    """KV in memory; null is no limit. A tenant at its limit makes room by evicting its own blocks."""
    disk_bytes: int | None = Field(default=None, ge=0)
    """KV on disk; null is no limit."""


class TenantConfig(QuotaConfig):
    """A tenant with a quota of its own."""

    name: str = Field(min_length=1)
    """The name that the gateways give the API key."""


class KvStoreConfig(ServiceConfig):
    """A KV store: blocks beyond the workers."""

    store_id: str | None = Field(default=None, min_length=1, max_length=256)
    """Unique in the mesh and stable across restarts; by default host:port."""
    memory_bytes: int = Field(default=1 << 30, ge=1 << 16)
    """Memory for KV blocks. The machine gives it as they fill."""
    draft_layers: int | None = Field(default=None, ge=0)
    """How many draft layers have room for their KV in each block, beside the model's layers. By default as many as the
    first worker that attaches has; the model's layers are kept for all workers.
    """
    session_seconds: float = Field(default=10.0, gt=0)
    """A worker that does not renew its session for this long is detached."""
    disk: DiskConfig = DiskConfig()
    quota: QuotaConfig = QuotaConfig()
    """The quota of every tenant that `tenants` does not name."""
    tenants: tuple[TenantConfig, ...] = ()
    """Tenants with quotas of their own. What is not set is no limit, whatever `quota` says."""
    max_sessions: int = Field(default=1024, ge=1)
    """Workers that may be attached at once."""
    offer_seconds: float = Field(default=30.0, gt=0)
    """How long a worker may take to push what it offered."""
    index: IndexConfig = IndexConfig()
    transfer: TransferConfig = TransferConfig()

    @model_validator(mode="after")
    def _names_no_tenant_twice(self) -> Self:
        names = [tenant.name for tenant in self.tenants]
        if len(set(names)) < len(names):
            raise ValueError("tenants has a name twice")
        return self
