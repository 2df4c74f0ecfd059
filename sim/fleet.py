"""What a simulated fleet is made of: one YAML file, with the product's own settings where it has them."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from decode_svc.config import DecodeQueueConfig
from engine.config import MOST_REQUESTS, MOST_STEP_TOKENS, SparsePrefillConfig
from engine.parallel.config import ParallelConfig
from gateway.config import DispatchConfig
from mesh.blocks import BLOCK_TOKENS
from mesh.config import Config
from mesh.domain.workers import WorkerRole
from mesh.errors import ConfigError
from prefill_svc.config import PrefillQueueConfig
from scheduler.config import LeaseConfig, ObjectivesConfig, PlacementConfig, ScalingConfig, StoreLinkConfig


class GroupConfig(Config):
    """Workers of one role that are alike."""

    replicas: int = Field(default=0, ge=0, le=100_000)
    """Workers at the start."""
    ranks: int = Field(default=1, ge=1)
    """DP ranks of each worker, which step together: a step takes as long as its slowest rank. Blocks, requests and
    tokens below are those of a rank. With more than one, every token's time is simulated by itself.
    """
    prompt_wait_steps: int = Field(default=ParallelConfig().prompt_wait_steps, ge=0)
    """As engine.parallel.prompt_wait_steps."""
    context_parallel_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] | None = (
        ParallelConfig().context_parallel_tokens
    )
    """As engine.parallel.context_parallel_tokens."""
    context_parallel_reach: int | None = Field(default=None, ge=1)
    """As engine.parallel.context_parallel_reach."""
    costs: Path | None = None
    """Their cost file; by default the fleet's."""
    total_blocks: int = Field(default=16384, ge=2)
    """Blocks of 64 tokens in the KV pool."""
    host_blocks: int = Field(default=0, ge=0)
    """Blocks in host memory, which are read back at `host_read_bytes_per_second` of the cost file."""
    max_requests: int = Field(default=64, ge=1, le=MOST_REQUESTS)
    """Requests that run at once."""
    max_step_tokens: int = Field(default=2048, ge=64, le=MOST_STEP_TOKENS)
    """Tokens computed in one step."""
    mixed_step_ms: Annotated[float, Field(gt=0)] | Literal["auto"] | None = "auto"
    """As engine.mixed_step_ms."""
    prompt_share: float | None = Field(default=None, gt=0, lt=1)
    """As engine.prompt_share."""
    captured_rows: int = Field(default=0, ge=0)
    """Rows of the largest captured decode step, which computes few tokens of prompts too; 0 if none is captured."""
    captured_prompt_tokens: int = Field(default=0, ge=0)
    """Tokens of the largest captured step with prompts: it is launched in `captured_launch_ms` of the cost file, others
    in `launch_ms`; 0 if none is captured.
    """
    prefix_cache: bool = True
    """Reuse blocks of equal prefixes."""
    layerwise_tokens: int = Field(default=2048, ge=64)
    """Prompts of at least this many tokens are pushed while later layers are computed."""
    can_prefill: bool = True
    """Whether a decode worker computes prompts."""
    status_interval_seconds: float = Field(default=0.05, gt=0)
    """Least time between two reports to the scheduler."""
    slow: float = Field(default=0.0, ge=0, lt=1)
    """Share of the workers whose steps take `slow_factor` times as long."""
    slow_factor: float = Field(default=1.0, ge=1)
    """See `slow`."""

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(
            dp=self.ranks,
            prompt_wait_steps=self.prompt_wait_steps,
            context_parallel_tokens=self.context_parallel_tokens,
            context_parallel_reach=self.context_parallel_reach,
        )

    @model_validator(mode="after")
    def _a_step_has_a_token_for_every_request(self) -> Self:
        if self.max_requests > self.max_step_tokens:
            raise ValueError("max_step_tokens must be at least max_requests: lower one or raise the other")
        return self


class StoresConfig(Config):
    """KV stores, which are alike."""

    replicas: int = Field(default=0, ge=0, le=1000)
    """How many."""
    total_blocks: int = Field(default=100_000, ge=1)
    """Blocks of 64 tokens that one holds."""
    bytes_per_second: float | None = Field(default=None, gt=0)
    """What one sends; by default the cost file's rate of a fetch."""


class SchedulingConfig(Config):
    """The scheduler's own settings, under its own names."""

    lease: LeaseConfig = LeaseConfig(gather_seconds=0.0, max_workers=100_000, max_cached_blocks=50_000_000)
    placement: PlacementConfig = PlacementConfig()
    objectives: ObjectivesConfig = ObjectivesConfig()
    scaling: ScalingConfig = ScalingConfig()
    store_link: StoreLinkConfig = StoreLinkConfig()
    hints: bool = True
    """Whether workers tell the scheduler which blocks they hold."""
    assumed_output: Literal["mean", "most"] = "mean"
    """Output that placement expects of a request: the mean of those that ended, or its max_tokens."""


class Fault(Config):
    """Something that goes wrong, once at a time or again and again."""

    kind: Literal["die", "freeze", "slow_link", "slow_steps", "upgrade"]
    """die: the process ends and starts again; freeze: no progress for `seconds`; slow_link, slow_steps: it takes
    `factor` times as long for `seconds`; upgrade: one after the other drains, leaves and starts again.
    """
    role: Literal["prefill", "decode", "store"] = "decode"
    """Whom it hits."""
    at: float | None = Field(default=None, ge=0)
    """Seconds after the start; null leaves it to `per_hour`."""
    per_hour: float = Field(default=0.0, ge=0)
    """How often one of them is hit, in an hour."""
    seconds: float = Field(default=10.0, gt=0)
    factor: float = Field(default=10.0, ge=1)


class FleetConfig(Config):
    """A fleet of workers and stores, with the settings of the services around them."""

    costs: Path | None = None
    """Cost file of all workers, made by `deepmesh calibrate`; by default what is assumed without measurements."""
    block_bytes: int = Field(default=4_500_000, ge=1)
    """One block of 64 tokens of KV, all layers. DeepSeek-R1: 61 layers x 576 numbers x 2 bytes x 64 tokens."""
    layers: int = Field(default=61, ge=1)
    """Layers of KV."""
    context_tokens: int = Field(default=131_072, ge=BLOCK_TOKENS)
    """Longest prompt and answer together."""
    prefill: GroupConfig = GroupConfig()
    decode: GroupConfig = GroupConfig(replicas=1)
    stores: StoresConfig = StoresConfig()
    scheduler: SchedulingConfig = SchedulingConfig()
    dispatch: DispatchConfig = DispatchConfig()
    prefill_queue: PrefillQueueConfig = PrefillQueueConfig()
    decode_queue: DecodeQueueConfig = DecodeQueueConfig()
    sparse_prefill: SparsePrefillConfig = SparsePrefillConfig()
    """How all workers attend to long prompts: `sparse_pairs_ms` of the cost file says what that takes."""
    every_token: bool = False
    """Whether each token's time is simulated by itself, also with one rank: without, such workers' times between tokens
    are unknown. Takes several times as long.
    """
    speeds: bool = True
    """Whether workers tell the scheduler how fast they measured themselves before they served."""
    fair: bool = True
    """Whether tenants are told apart where they wait."""
    shortest_first: bool = True
    """Whether of prompts that come to a worker during one step the shortest goes first, and not the earliest."""
    autoscale: bool = False
    """Whether workers come and go as the scheduler's scaling wants."""
    faults: tuple[Fault, ...] = ()

    def group(self, role: WorkerRole) -> GroupConfig:
        return self.decode if role is WorkerRole.DECODE else self.prefill

    @model_validator(mode="after")
    def _somebody_generates_and_somebody_computes_prompts(self) -> Self:
        if not self.decode.replicas:
            raise ValueError("decode.replicas must be at least 1: prefill workers alone generate nothing")
        if not self.decode.can_prefill and not self.prefill.replicas:
            raise ValueError("no worker computes prompts: add prefill workers, or leave decode.can_prefill on")
        return self


def check_holds(fleet: FleetConfig, tokens: int) -> None:
    """Raises ConfigError if no decode worker could hold a request of this many tokens."""
    room = min(fleet.context_tokens, fleet.decode.total_blocks * BLOCK_TOKENS)
    if tokens > room:
        raise ConfigError(
            f"the workload has requests of {tokens} tokens and a decode worker has room for {room}: raise "
            "decode.total_blocks or context_tokens, or shorten the requests"
        )
