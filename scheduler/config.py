"""Configuration of the scheduler."""

from pydantic import Field

from mesh.config import Config, ServiceConfig


class LeaseConfig(Config):
    # A worker that reports nothing for this long is lost; workers report at least three times as often.
    seconds: float = Field(default=10.0, gt=0)
    # A placement is added to a worker's reported load until a status arrives that is later by this much.
    settle_seconds: float = Field(default=0.25, ge=0)
    # How long after its start a scheduler refuses no request for good, since workers that another scheduler knew may
    # not have reported yet; by default one lease.
    gather_seconds: float | None = Field(default=None, ge=0)
    max_workers: int = Field(default=1024, ge=1)
    # Block hashes kept for all workers together, about 100 bytes each. More are forgotten, which loses only hints.
    max_cached_blocks: int = Field(default=500_000, ge=0)


class PlacementConfig(Config):
    """Constants of the prediction, and what it assumes while workers have not measured."""

    prefill_tokens_per_second: float = Field(default=5000.0, gt=0)
    decode_step_ms: float = Field(default=20.0, gt=0)
    mean_output_tokens: float = Field(default=256.0, gt=0)
    # How much one more request lengthens a step, relative to a step of one request.
    step_growth: float = Field(default=0.02, ge=0)
    # Requests that may wait on one worker for a place in its batch; 0 refuses what cannot start at once.
    queue_requests: int = Field(default=512, ge=0)
    # Cost of having a prompt computed by another worker: the calls, and the push of its KV while no prefill worker has
    # measured one.
    handover_ms: float = Field(default=5.0, ge=0)
    push_bytes_per_second: float = Field(default=2e9, gt=0)
    # Share of a push's time that remains after the computation if layers are pushed while later ones compute.
    layerwise_rest: float = Field(default=0.125, ge=0, le=1)
    # A fetch from a KV store, while a worker has not measured one.
    fetch_latency_ms: float = Field(default=2.0, ge=0)
    fetch_bytes_per_second: float = Field(default=1e9, gt=0)
    # Prompts with at most this many uncached tokens delay no request on a decode worker.
    short_prompt_tokens: int = Field(default=64, ge=0)
    # Weight of the delay of requests that decode while a prompt is computed, relative to the prompt's own delay.
    interference: float = Field(default=1.0, ge=0)


class StoreLinkConfig(Config):
    """How KV stores are asked what they hold; without an answer in time placement has no hint."""

    match_ms: float = Field(default=20.0, gt=0)
    # They are not asked if at most this many blocks of a prompt are cached by no worker.
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
    # host:port of the KV stores; workers must be given the same.
    stores: tuple[str, ...] = ()
    store_link: StoreLinkConfig = StoreLinkConfig()
    # Decisions kept for ListDecisions.
    decisions: int = Field(default=2000, ge=1)
    # Gateways that may watch the registry at once.
    max_watchers: int = Field(default=1024, ge=1)

    @property
    def internal_addresses(self) -> tuple[str, ...]:
        return (self.server.host, *self.stores)
