"""Workers as the scheduler knows them: who they are, and how loaded they said they were."""

from dataclasses import dataclass
from enum import Enum


class WorkerState(Enum):
    SERVING = "serving"
    # Finishes what it has, takes nothing new.
    DRAINING = "draining"


class WorkerRole(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class KvNamespace:
    """What a worker's cached KV bytes mean; told on to whoever watches the registry."""

    weights_fingerprint: str
    dtype: str
    scale: float
    layers: int
    block_tokens: int
    layout: str


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Who a worker is. Fixed while its process lives."""

    worker_id: str
    incarnation: str
    role: WorkerRole
    endpoint: str
    model: str
    kv_namespace: KvNamespace
    context_tokens: int
    total_blocks: int
    max_requests: int
    can_prefill: bool
    # Token ids it takes are below this; 0 where it does not say.
    vocabulary_size: int = 0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How loaded a worker is, as of one engine step. Rates and means are 0 while unknown."""

    running_requests: int = 0
    waiting_requests: int = 0
    # Prompt tokens accepted and not yet computed.
    queued_prefill_tokens: int = 0
    free_blocks: int = 0
    prefill_tokens_per_second: float = 0.0
    decode_step_ms: float = 0.0
    mean_output_tokens: float = 0.0
