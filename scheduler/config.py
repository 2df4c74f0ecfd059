"""Configuration of the scheduler."""

from pydantic import Field

from mesh.config import Config, ServiceConfig


class LeaseConfig(Config):
    # A worker that says nothing for this long is lost; workers speak at least three times as often.
    seconds: float = Field(default=10.0, gt=0)
    # A placement counts against a worker beside its reported load until a status comes that is later by this much.
    settle_seconds: float = Field(default=0.25, ge=0)
    max_workers: int = Field(default=1024, ge=1)
    # Block hashes remembered over all workers, about 100 bytes each; more are forgotten, and only hints are lost.
    max_cached_blocks: int = Field(default=500_000, ge=0)


class PlacementConfig(Config):
    """What prediction assumes where workers have not measured yet."""

    prefill_tokens_per_second: float = Field(default=5000.0, gt=0)
    decode_step_ms: float = Field(default=20.0, gt=0)
    mean_output_tokens: float = Field(default=256.0, gt=0)
    # How much one more request lengthens a step, relative to a step of one request.
    step_growth: float = Field(default=0.02, ge=0)
    # Requests that may wait on one worker for a place in its batch; 0 refuses what cannot start at once.
    queue_requests: int = Field(default=512, ge=0)
    # What a prompt costs that another worker computes: the calls around it, and the push of its KV while no prefill
    # worker has measured one.
    handover_ms: float = Field(default=5.0, ge=0)
    push_bytes_per_second: float = Field(default=2e9, gt=0)
    # Of a push while layers are computed, this share is left when the prompt is computed.
    layerwise_rest: float = Field(default=0.125, ge=0, le=1)
    # A fetch from a KV store, where a worker has not measured one.
    fetch_latency_ms: float = Field(default=2.0, ge=0)
    fetch_bytes_per_second: float = Field(default=1e9, gt=0)
    # Prompts with at most so many uncached tokens disturb no decode worker.
    short_prompt_tokens: int = Field(default=64, ge=0)
    # How much the delay of requests that decode beside a prompt counts, against the prompt's own delay.
    interference: float = Field(default=1.0, ge=0)


class StoreLinkConfig(Config):
    """How KV stores are asked what they hold; no answer in time means no hint."""

    match_ms: float = Field(default=20.0, gt=0)
    # They are not asked where so many blocks of a prompt, or fewer, are cached by no worker.
    ignored_blocks: int = Field(default=1, ge=0)
    poll_seconds: float = Field(default=1.0, gt=0)


class ObjectivesConfig(Config):
    """Latency beyond which a request is refused; absent demands nothing."""

    ttft_ms: float | None = Field(default=None, gt=0)
    tpot_ms: float | None = Field(default=None, gt=0)


class SchedulerConfig(ServiceConfig):
    lease: LeaseConfig = LeaseConfig()
    placement: PlacementConfig = PlacementConfig()
    objectives: ObjectivesConfig = ObjectivesConfig()
    # host:port of the KV stores; the workers are told the same.
    stores: tuple[str, ...] = ()
    store_link: StoreLinkConfig = StoreLinkConfig()
    # Decisions kept for ListDecisions.
    decisions: int = Field(default=2000, ge=1)
    # Gateways that may watch the registry at once.
    max_watchers: int = Field(default=1024, ge=1)
