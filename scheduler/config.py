"""Configuration of the scheduler."""

from pathlib import Path

from pydantic import Field

from mesh.config import Config, ServiceConfig


class LeaseConfig(Config):
    """How long workers are believed to live, and what is remembered of them."""

    seconds: float = Field(default=10.0, gt=0)
    """A worker that reports nothing for this long is lost; workers report at least three times as often."""
    settle_seconds: float = Field(default=0.25, ge=0)
    """A placement is added to a worker's reported load until a status tells of a step that began after it, or is later
    by this much.
    """
    gather_seconds: float | None = Field(default=None, ge=0)
    """How long after its start a scheduler refuses no request for good, since workers that another scheduler knew may
    not have reported yet; by default one lease.
    """
    max_workers: int = Field(default=1024, ge=1)
    """Workers that may be registered at once."""
    max_cached_blocks: int = Field(default=500_000, ge=0)
    """Block hashes kept for all workers together, about 100 bytes each. More are forgotten, which loses only hints."""


class PlacementConfig(Config):
    """Constants of the prediction, and what it assumes while workers have not measured."""

    costs: Path | None = None
    """Cost file of the workers, made by `deepmesh calibrate`: how the time of a step grows with its requests, and what
    prompts, pushes and fetches take while a worker has not measured its own.
    """
    mean_output_tokens: float = Field(default=256.0, gt=0)
    """Length of an answer, while none has ended."""
    queue_requests: int = Field(default=512, ge=0)
    """Requests that may wait on one worker for a place in its batch; 0 refuses what cannot start at once."""
    handover_ms: float | None = Field(default=None, ge=0)
    """Time of the calls where another worker computes the prompt; by default the cost file's."""
    layerwise_rest: float = Field(default=0.125, ge=0, le=1)
    """Share of a push's time that remains after the computation if layers are pushed while later ones compute."""
    short_prompt_tokens: int = Field(default=64, ge=0)
    """Prompts with at most this many uncached tokens delay no request on a decode worker."""
    interference: float = Field(default=1.0, ge=0)
    """Weight of the delay of requests that decode while a prompt is computed, relative to the prompt's own delay."""


class StoreLinkConfig(Config):
    """How KV stores are asked what they hold; without an answer in time placement has no hint."""

    match_ms: float = Field(default=20.0, gt=0)
    """Longest wait for an answer."""
    ignored_blocks: int = Field(default=1, ge=0)
    """They are not asked if at most this many blocks of a prompt are cached by no worker."""
    poll_seconds: float = Field(default=1.0, gt=0)
    """Pause between two questions for a store's status."""


class ObjectivesConfig(Config):
    """Latency beyond which a request is refused; absent demands nothing."""

    ttft_ms: float | None = Field(default=None, gt=0)
    """Predicted milliseconds to the first token."""
    tpot_ms: float | None = Field(default=None, gt=0)
    """Predicted milliseconds per token after the first."""


class ScalingConfig(Config):
    """How many workers of each role the scheduler asks for."""

    target_use: float = Field(default=0.75, gt=0, le=1)
    """Share of its slots, or of its rate of prompt tokens, that a worker should use; above it more are asked for."""
    slack: float = Field(default=0.15, ge=0, lt=1)
    """Fewer workers are asked for only if their use would then be below the target by this share of it."""
    scale_in_seconds: float = Field(default=300.0, ge=0)
    """For how long fewer workers must be enough."""
    max_replicas: int = Field(default=1024, ge=1)
    """Most workers of a role that are asked for."""
    arrivals_seconds: float = Field(default=30.0, gt=0)
    """Time over which the rate of arriving requests is averaged."""
    requests_per_replica: float = Field(default=32.0, ge=1)
    """Requests that a decode worker is taken to serve at once while none lives."""
    period_seconds: float = Field(default=1.0, gt=0)
    """Pause between two decisions."""


class PodsConfig(Config):
    """What Kubernetes is told of the workers' pods: needs the right to patch pods, and no other."""

    deletion_costs: bool = False
    """Whether each worker's pod is given the cost of its end, so that the cheapest go first when fewer are wanted; a
    worker's id must be its pod's name.
    """
    period_seconds: float = Field(default=15.0, gt=0)
    """Pause between two looks at the costs; one is written again once it is off by half."""


class SchedulerConfig(ServiceConfig):
    """The scheduler: where requests go."""

    lease: LeaseConfig = LeaseConfig()
    placement: PlacementConfig = PlacementConfig()
    objectives: ObjectivesConfig = ObjectivesConfig()
    scaling: ScalingConfig = ScalingConfig()
    pods: PodsConfig = PodsConfig()
    stores: tuple[str, ...] = ()
    """host:port of the KV stores; workers must be given the same."""
    store_link: StoreLinkConfig = StoreLinkConfig()
    decisions: int = Field(default=2000, ge=1)
    """Decisions kept for ListDecisions."""
    max_watchers: int = Field(default=1024, ge=1)
    """Gateways and decode workers that may watch the registry at once."""

    @property
    def internal_addresses(self) -> tuple[str, ...]:
        return (self.server.host, *self.stores)
