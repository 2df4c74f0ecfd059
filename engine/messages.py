"""What a service process and its rank say to each other: msgspec frames over a Unix socket, nothing pickled.

Service to rank: one Start, then Submit and Cancel at will, Stop at the end.
Rank to service: one Ready (or Failed), then a StepResult after each step that has something to say.
"""

from typing import Literal

import msgspec

from mesh.blocks import BLOCK_TOKENS


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How to draw a token; validated by the gateway. temperature 0 is greedy, top_k 0 keeps all."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    # Report log probabilities, with this many alternatives; None reports nothing.
    top_logprobs: int | None = None


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """At one position: of the token drawn, and of the most likely ones, best first. Natural log, temperature 1."""

    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]


class KvNamespace(msgspec.Struct, frozen=True):
    """What cached KV bytes mean; blocks may move only between equal namespaces."""

    weights_fingerprint: str
    dtype: str
    layers: int
    layout: str
    scale: float = 1.0
    block_tokens: int = BLOCK_TOKENS


class Start(msgspec.Struct, tag="start"):
    # An engine.config.EngineConfig as JSON.
    config: bytes
    # A mesh.config.ObserveConfig as JSON.
    observe: bytes


class Submit(msgspec.Struct, tag="submit"):
    # Chosen by the service; names the request between the two processes.
    key: int
    request_id: str
    token_ids: list[int]
    sampling: Sampling
    max_tokens: int
    # The model's own end-of-sequence ids are added by the engine unless ignore_eos.
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    cache_salt: bytes = b""


class Cancel(msgspec.Struct, tag="cancel"):
    key: int


class Stop(msgspec.Struct, tag="stop"):
    pass


class Ready(msgspec.Struct, tag="ready"):
    model: str
    namespace: KvNamespace
    context_tokens: int
    vocabulary_size: int
    total_blocks: int
    max_requests: int
    # Highest resident memory of the rank while it loaded.
    peak_bytes: int


class Failed(msgspec.Struct, tag="failed"):
    """The rank could not start; it exits after this."""

    reason: str
    message: str


class Refusal(msgspec.Struct, array_like=True):
    """Why the engine did not take a request: a reason of mesh.errors, and a sentence."""

    reason: str
    message: str


class Output(msgspec.Struct, array_like=True):
    """What one step brought for one request.

    Exactly one output of a request has `finish` or `refusal`, and it is the last.
    """

    key: int
    # Position of token_ids[0], prompt included.
    first_position: int
    token_ids: list[int]
    logprobs: list[Logprobs] | None = None
    # With the request's first token: prompt tokens found in the cache.
    cached_tokens: int | None = None
    finish: Literal["stop", "length", "cancelled"] | None = None
    # Of a request that can never run here; it has no other output.
    refusal: Refusal | None = None


class Load(msgspec.Struct, frozen=True):
    running_requests: int
    waiting_requests: int
    queued_prefill_tokens: int
    free_blocks: int
    # Exponentially smoothed; 0 while unknown.
    prefill_tokens_per_second: float
    decode_step_ms: float
    mean_output_tokens: float


class StepResult(msgspec.Struct, tag="step"):
    step: int
    outputs: list[Output]
    load: Load
    # Content-addressed blocks that became reusable, and that were evicted, in this step.
    stored_blocks: list[bytes] = []
    removed_blocks: list[bytes] = []


ToRank = Start | Submit | Cancel | Stop
FromRank = Ready | Failed | StepResult
