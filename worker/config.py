"""Base of a worker's configuration."""

from typing import Self

from pydantic import Field, SecretStr, model_validator

from engine.config import EngineConfig
from mesh.addresses import Address, Addresses, split_addresses
from mesh.config import Config, ServiceConfig
from transfer.block_macs import Authorship
from worker.events.config import KvEventsConfig

LEAST_SECRET = 16


class KvAuthenticityConfig(Config):
    """Which authors of KV in a store are trusted (docs/security.md)."""

    secret: SecretStr | None = Field(default=None, min_length=LEAST_SECRET)
    """A secret that all workers of the mesh share and no store knows, best read from a file or the environment. With
    it, workers sign the blocks that they offer to stores, and accept from stores only blocks that a worker has signed.
    Without it, stores are trusted.
    """
    accepted_secrets: tuple[SecretStr, ...] = ()
    """Further secrets with which blocks may be signed, while `secret` is being replaced."""

    @model_validator(mode="after")
    def _accepts_further_secrets(self) -> Self:
        if self.accepted_secrets and self.secret is None:
            raise ValueError("accepted_secrets needs a secret too")
        if any(len(secret.get_secret_value()) < LEAST_SECRET for secret in self.accepted_secrets):
            raise ValueError(f"accepted_secrets has one of fewer than {LEAST_SECRET} characters")
        return self


class WorkerConfig(ServiceConfig):
    """What a worker computes with, and how it takes part in the mesh."""

    engine: EngineConfig
    scheduler: Addresses
    """host:port of the scheduler. There is no default: a worker must never join a mesh that it was not told about.
    While the scheduler is away, the worker serves those who know it. Several are separated by commas; the worker
    reports to each.
    """
    worker_id: str | None = Field(default=None, min_length=1, max_length=256)
    """Unique in the mesh and stable across restarts; by default host:port."""
    status_interval_seconds: float = Field(default=0.05, gt=0)
    """Least time between two reports to the scheduler."""
    stores: tuple[Address, ...] = ()
    """host:port of the KV stores; the scheduler must be given the same."""

    kv: KvAuthenticityConfig = KvAuthenticityConfig()
    kv_events: KvEventsConfig = KvEventsConfig()
    other_role: tuple[str, ...] = ()
    """Settings that differ once this worker takes the other role (`deepmesh role`), as KEY=VALUE of that role's
    service: [engine.max_requests=8], or the files of security.tls, since certificates name a role.
    """

    def authorship(self, endpoint: str) -> Authorship | None:
        """What its ranks sign blocks with; None without a secret. `endpoint` names a worker that has no id."""
        if self.kv.secret is None:
            return None
        secret, *accepted = (each.get_secret_value().encode() for each in (self.kv.secret, *self.kv.accepted_secrets))
        return Authorship(secret, self.worker_id or endpoint, tuple(accepted))

    @property
    def internal_addresses(self) -> tuple[str, ...]:
        return (self.server.host, *split_addresses(self.scheduler), *self.stores)

    @property
    def rank_engine(self) -> EngineConfig:
        """The ranks' configuration: UCX listens on the same network device as gRPC. Raises ConfigError."""
        transfer = self.engine.transfer
        if transfer is None:
            return self.engine
        return self.engine.model_copy(update={"transfer": transfer.listening_on(self.server.host)})
