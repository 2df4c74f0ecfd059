"""Base of a worker's configuration."""

from typing import Self

from pydantic import Field, SecretStr, model_validator

from engine.config import EngineConfig
from mesh.addresses import split_addresses
from mesh.config import Config, ServiceConfig
from transfer.block_macs import Authorship

LEAST_SECRET = 16


class KvAuthenticityConfig(Config):
    """Who may have computed the KV that comes from a store (docs/security.md)."""

    secret: SecretStr | None = Field(default=None, min_length=LEAST_SECRET)
    """The same for every worker of the mesh, and known to no store; at best from a file or the environment. Workers
    vouch with it for the blocks that they offer to stores, and take only blocks from them that one of them vouches for.
    Without it stores are trusted.
    """
    accepted_secrets: tuple[SecretStr, ...] = ()
    """Others that blocks may be vouched for with, while `secret` is being replaced."""

    @model_validator(mode="after")
    def _accepts_secrets_beside_its_own(self) -> Self:
        if self.accepted_secrets and self.secret is None:
            raise ValueError("accepted_secrets needs a secret beside them")
        if any(len(secret.get_secret_value()) < LEAST_SECRET for secret in self.accepted_secrets):
            raise ValueError(f"accepted_secrets has one of fewer than {LEAST_SECRET} characters")
        return self


class WorkerConfig(ServiceConfig):
    """What a worker computes with, and how it takes part in the mesh."""

    engine: EngineConfig
    scheduler: str
    """host:port of the scheduler. There is no default: a worker must never join a mesh that it was not told of. While
    the scheduler is away the worker serves those who know it. Several are separated by commas: it reports to each.
    """
    worker_id: str | None = Field(default=None, min_length=1, max_length=256)
    """Unique in the mesh and stable across restarts; by default host:port."""
    status_interval_seconds: float = Field(default=0.05, gt=0)
    """Least time between two reports to the scheduler."""
    stores: tuple[str, ...] = ()
    """host:port of the KV stores; the scheduler is told the same."""

    kv: KvAuthenticityConfig = KvAuthenticityConfig()
    other_role: tuple[str, ...] = ()
    """What differs once this worker has been told to take the other role (`deepmesh role`), as KEY=VALUE of that role's
    service: [engine.max_requests=8], or the files of security.tls, whose certificates name a role.
    """

    def authorship(self, endpoint: str) -> Authorship | None:
        """What its ranks vouch for blocks with; `endpoint` names a worker that has no id."""
        if self.kv.secret is None:
            return None
        secret, *accepted = (each.get_secret_value().encode() for each in (self.kv.secret, *self.kv.accepted_secrets))
        return Authorship(secret, self.worker_id or endpoint, tuple(accepted))

    @property
    def internal_addresses(self) -> tuple[str, ...]:
        return (self.server.host, *split_addresses(self.scheduler), *self.stores)

    @property
    def rank_engine(self) -> EngineConfig:
        """What the ranks are told: UCX listens on the network device that gRPC listens on. Raises ConfigError."""
        transfer = self.engine.transfer
        if transfer is None:
            return self.engine
        return self.engine.model_copy(update={"transfer": transfer.listening_on(self.server.host)})
