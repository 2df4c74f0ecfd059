"""Configuration of the scheduler."""

from pathlib import Path

from pydantic import Field

from mesh.addresses import Address
from mesh.config import INTERNAL, Config, ServiceConfig


class LeaseConfig(Config):
    """How long a silent worker counts as alive, and how much is remembered of workers."""

    seconds: float = Field(default=10.0, gt=0)
    """A worker that reports nothing for this long is lost; workers report at least three times in this time."""
    settle_seconds: float = Field(default=0.25, ge=0, json_schema_extra=INTERNAL)
    """A placement is added to a worker's reported load until a report covers a step that began after it, or until a
    report arrives this much later.
    """
    gather_seconds: float | None = Field(default=None, ge=0, json_schema_extra=INTERNAL)
    """How long after its start a scheduler refuses no request for good: workers that another scheduler knew may not
    have reported yet. By default one lease.
    """
    max_workers: int = Field(default=1024, ge=1, json_schema_extra=INTERNAL)
    """Workers that may be registered at once."""
    max_cached_blocks: int = Field(default=500_000, ge=0, json_schema_extra=INTERNAL)
    """Block hashes kept for all workers together, about 100 bytes each. Those beyond are dropped, which loses only
    hints.
    """

    @property
    def gathering_seconds(self) -> float:
        return self.seconds if self.gather_seconds is None else self.gather_seconds


class PlacementConfig(Config):
    """Constants of the prediction, and assumptions while workers have not measured."""

    costs: Path | None = None
    """Cost file made by `deepmesh calibrate` for these workers: how a step's time grows with its requests, and the time
    of prompts, pushes and fetches while a worker has not measured its own.
    """
    mean_output_tokens: float = Field(default=256.0, gt=0, json_schema_extra=INTERNAL)
    """Assumed length of an answer while none has ended."""
    queue_requests: int = Field(default=512, ge=0)
    """Requests that may wait on one worker for a place in its batch; 0 refuses any that cannot start at once."""
    handover_ms: float | None = Field(default=None, ge=0, json_schema_extra=INTERNAL)
    """Time of the calls between workers if another worker computes the prompt; by default the cost file's."""
    layerwise_rest: float = Field(default=0.125, ge=0, le=1, json_schema_extra=INTERNAL)
    """Share of a push's time that remains after the computation if layers are pushed while later ones are computed."""
    short_prompt_tokens: int = Field(default=64, ge=0, json_schema_extra=INTERNAL)
    """Prompts with at most this many uncached tokens delay no request on a decode worker."""
    interference: float = Field(default=1.0, ge=0, json_schema_extra=INTERNAL)
    """Weight of the delay of requests that decode while a prompt is computed, relative to the prompt's own delay."""


class StoreLinkConfig(Config):
    """How KV stores are asked what they hold. Placement does without an answer that is late."""

    match_ms: float = Field(default=20.0, gt=0)
    """Longest wait for an answer."""
    ignored_blocks: int = Field(default=1, ge=0)
    """Stores are not asked if at most this many blocks of a prompt are cached by no worker."""
    poll_seconds: float = Field(default=1.0, gt=0)
    """Pause between two status calls to a store."""


class ObjectivesConfig(Config):
    """Predicted latency above which a request is refused; null demands nothing."""

    ttft_ms: float | None = Field(default=None, gt=0)
    """Predicted milliseconds to the first token."""
    tpot_ms: float | None = Field(default=None, gt=0)
    """Predicted milliseconds per token after the first."""
    wait_margin: float = Field(default=1.5, ge=0)
    """How much longer than predicted a request may wait for its first token, as a share of the wait. Half of all waits
    take longer than predicted: with 0 a full fleet misses `ttft_ms` for about half of what it admits."""


class ScalingConfig(Config):
    """How many workers of each role the scheduler asks for."""

    target_use: float = Field(default=0.75, gt=0, le=1)
    """Share of its slots, or of its rate of prompt tokens, that a worker should use. Above it, more workers are wanted.
    """
    slack: float = Field(default=0.15, ge=0, lt=1)
    """Fewer workers are wanted only if their use would then be below the target by this share of it."""
    scale_in_seconds: float = Field(default=300.0, ge=0)
    """How long fewer workers must have been enough before fewer are wanted."""
    max_replicas: int = Field(default=1024, ge=1, json_schema_extra=INTERNAL)
    """Most workers of a role that are ever wanted."""
    arrivals_seconds: float = Field(default=30.0, gt=0)
    """Time over which the rate of arriving requests is averaged."""
    requests_per_replica: float = Field(default=32.0, ge=1, json_schema_extra=INTERNAL)
    """Requests that a decode worker is assumed to serve at once while none is alive."""
    period_seconds: float = Field(default=1.0, gt=0, json_schema_extra=INTERNAL)
    """Pause between two decisions."""


class PodsConfig(Config):
    """What Kubernetes is told about the workers' pods. It needs only the right to patch pods."""

    deletion_costs: bool = False
    """Whether each worker's pod gets a deletion cost, so that Kubernetes ends the cheapest pods first when fewer are
    wanted; each worker's id must be the name of its pod.
    """
    period_seconds: float = Field(default=15.0, gt=0, json_schema_extra=INTERNAL)
    """Pause between two checks of the costs; a cost is written again once it is off by half."""


class SchedulerConfig(ServiceConfig):
    """The scheduler: where requests go."""

    lease: LeaseConfig = LeaseConfig()
    placement: PlacementConfig = PlacementConfig()
    objectives: ObjectivesConfig = ObjectivesConfig()
    scaling: ScalingConfig = ScalingConfig()
    pods: PodsConfig = PodsConfig()
    stores: tuple[Address, ...] = ()
    """host:port of the KV stores; workers must be given the same."""
    store_link: StoreLinkConfig = Field(default=StoreLinkConfig(), json_schema_extra=INTERNAL)
    decisions: int = Field(default=2000, ge=1)
    """Decisions kept for ListDecisions."""
    max_watchers: int = Field(default=1024, ge=1, json_schema_extra=INTERNAL)
    """Gateways and decode workers that may watch the registry at once."""

    @property
    def internal_addresses(self) -> tuple[str, ...]:
        return (self.server.host, *self.stores)
