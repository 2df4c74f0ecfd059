"""The engine's configuration. `engine.settings` settles what is "auto"."""

import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine.balance.config import AUTO_INTERVAL, BalanceConfig
from engine.drafts.config import DraftsConfig
from engine.offload.config import OffloadConfig
from engine.oracle.config import OracleConfig
from engine.parallel.config import ParallelConfig
from mesh.config import INTERNAL, Config
from mesh.domain.sparse_prefill import SparsePrefill
from transfer.config import TransferConfig

# engine.step.agreement packs them into 12 and 20 bits.
MOST_REQUESTS = 4095
MOST_STEP_TOKENS = 1_048_575


class SparsePrefillConfig(Config):
    """Attention of long prompts that leaves out what hardly counts: see docs/sparse-prefill.md. It is offered if all
    workers of the model that compute prompts are set alike, and a request may refuse it.
    """

    recall: float | None = Field(default=None, gt=0, lt=1)
    """The share of the attention of a chunk's last 64 queries that each head keeps at least, for example 0.95; other
    queries may keep less. By default attention is exact.
    """
    from_tokens: int = Field(default=16384, ge=0)
    """Tokens with fewer tokens than this before them get exact attention."""

    @property
    def offered(self) -> SparsePrefill | None:
        """None if attention is exact."""
        return None if self.recall is None else SparsePrefill(self.from_tokens, self.recall)


class EngineConfig(Config):
    """What a worker computes with. On GPUs keys that are not given are chosen by model, cards and role
    (docs/choices.md); their defaults are those of a CPU.
    """

    backend: Literal["model", "oracle"] = "model"
    """"oracle" needs no checkpoint: see engine.oracle."""
    model_dir: Path | None = None
    """A Hugging Face checkpoint of the DeepSeek V3 architecture."""
    model_name: str | None = None
    """Served under this name; by default the directory's."""
    aim: Literal["balanced", "throughput", "latency"] = "balanced"
    """What the settings that are not given are chosen for on a GPU (docs/choices.md): answers at an even pace for
    many, as many tokens as can be, or one answer as fast as can be.
    """
    exact: bool = False
    """Keep the number formats that the checkpoint was published with; without it another format may be chosen once its
    answers were shown to be as good (docs/quality-gpu.md).
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" is the first GPU that the process sees, or the CPU where there is none."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The number format that the model computes in; "auto" is bfloat16 on a GPU and float32 on a CPU."""
    kv_dtype: Literal["auto", "float8_e4m3fn"] = "auto"
    """How the KV pool stores latents: as the model computes, or in one byte."""
    kv_scale: float = Field(default=1.0, gt=0)
    """A latent is this number times what a pool of one-byte numbers stores for it."""
    prompt_attention_dtype: Literal["auto", "float8_e4m3fn"] = "auto"
    """The format in which queries, keys and values of prompts are multiplied: as the model computes, or in one byte, to
    which they are converted on the way. The latter is fast on a Hopper GPU alone, and slow elsewhere. Sparse prompts,
    short chunks after a long prefix, and up to position 6,963 tokens of DeepSeek-V3.2's that select what they attend
    to, are computed as by default.
    """
    weights: Literal["auto", "quantized", "dequantized", "fp8", "w4a8"] = "auto"
    """Quantized weights are either multiplied as they are, by activations that are quantized on the way, or converted
    to `dtype` when they are loaded. "auto" keeps them quantized on a GPU. Weights in bfloat16 are quantized while they
    are loaded: with "fp8" to blocks of 128x128, with "w4a8" also, and routed experts to INT4 in groups of 128. So are
    those in INT4 of AWQ and GPTQ, which are not multiplied as they are, and those of compressed-tensors, whose experts
    "w4a8" leaves as they are.
    """
    query_weights: Literal["published", "fp8"] = "published"
    """How projections of queries (q_b_proj) that a checkpoint has in bfloat16 are multiplied: as published, or in FP8,
    to which they are converted when they are loaded. The latter applies only where quantized weights are kept.
    """
    kv_namespace: str | None = Field(default=None, min_length=1)
    """Workers that declare the same name share KV although their checkpoints differ, as those of one model in FP8 and
    in INT4 do; by default a digest of the checkpoint stands in its place. The KV's dtype, layers, layout and scale must
    be equal in any case.
    """
    random_weights: bool = Field(default=False, json_schema_extra=INTERNAL)
    """Draw weights at random, for measurements; only config.json is read from model_dir."""
    decode_graphs: Literal["auto", "off"] = Field(default="auto", json_schema_extra=INTERNAL)
    """Decode steps run as captured graphs; "auto" on a GPU."""
    graph_rows: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Sizes of these graphs in rows; by default a few dozen up to max_requests, or without drafts up to 64 more."""
    prompt_graph_tokens: int = Field(default=1536, ge=0)
    """Steps with prompts of up to this many tokens run as captured graphs too, except for their attention, if decode
    steps do and no experts lie in host memory. That pays as long as the host takes longer to launch a step than the
    device takes to compute it. Capturing each size takes time at the start. 0 captures none.
    """
    warm_up: Literal["auto", "off"] = "auto"
    """Run each size of step before serving, so that no request waits for what is compiled at first use; "auto" on a
    GPU. "auto" also measures, on any device, how long steps and prompts take, unless the cache folder has that from an
    earlier start.
    """
    threads: int | None = Field(default=None, ge=1)
    """Compute threads of a rank on CPU; by default torch's choice, which several ranks divide."""
    max_requests: int = Field(default=64, ge=1, le=MOST_REQUESTS)
    """Requests that run at once."""
    max_step_tokens: int = Field(default=2048, ge=64, le=MOST_STEP_TOKENS)
    """Tokens computed in one step: one of each running request first, then chunks of prompts."""
    mixed_step_ms: Annotated[float, Field(gt=0)] | Literal["auto"] | None = "auto"
    """While requests decode, a step takes only as many tokens of prompts as let it end in about this many milliseconds,
    judged by earlier steps, but at least 16. "auto" is 2.1 times what steps without prompts take, and more while many
    prompts wait, where steps with prompts are captured (prompt_graph_tokens; one rank: of 4,096 tokens), with tp 1 and
    without a prompt_share. Else "auto" sets no bound, as null does: steps take all that fit into max_step_tokens.
    """
    prompt_share: float | None = Field(default=None, gt=0, lt=1)
    """The largest share of the time that prompts may take from requests that decode: with 0.33 a token takes 1.5 times
    as long on average. A step with prompts takes as long as it needs; steps without any follow until the share is kept.
    null sets no limit.
    """
    total_blocks: int | None = Field(default=None, ge=2)
    """Blocks of 64 tokens in the KV pool; by default what memory allows."""
    host_blocks: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Blocks of 64 tokens that each rank keeps in host memory once its KV pool evicts them; requests read them back
    instead of computing them. "auto" takes a tenth of the host's available memory (of the container's limit, if that is
    lower), divided among the ranks of the host, or its TP groups; on a GPU it is page-locked in the
    first seconds of serving. 0 keeps none. Without room for as many as are asked for, a warning is logged and none
    are kept.
    """
    kv_memory_fraction: float | None = Field(default=None, gt=0, le=0.95)
    """Share that the KV pool may take of the memory that nothing else needs; by default 0.25 on CPU, 0.95 on a GPU."""
    memory_share: float = Field(default=1.0, gt=0, le=1)
    """Share of the GPU's whole memory that this worker may use, weights included, if others compute there too."""
    context_tokens: int | None = Field(default=None, ge=1)
    """Caps the model's own context."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Launch a step before the one before it is read, so that the device never waits for the host; "auto" if the device
    computes while the host does other things.
    """
    prefix_cache: bool = True
    """Reuse blocks of equal prefixes."""
    transfer: TransferConfig | None = None
    """How KV moves between this worker and others; none moves without it."""
    parallel: ParallelConfig = ParallelConfig()
    balance: BalanceConfig = BalanceConfig()
    """Which rank holds which routed experts."""
    offload: OffloadConfig = OffloadConfig()
    oracle: OracleConfig = OracleConfig()
    drafts: DraftsConfig = DraftsConfig()
    sparse_prefill: SparsePrefillConfig = SparsePrefillConfig()

    @property
    def rank_threads(self) -> int | None:
        """Compute threads of a rank on CPU; None leaves the choice to torch."""
        if self.threads is None and self.parallel.ranks_a_host > 1:
            return max(1, len(os.sched_getaffinity(0)) // self.parallel.ranks_a_host)
        return self.threads

    @model_validator(mode="after")
    def _model_has_a_directory(self) -> Self:
        if self.backend == "model" and self.model_dir is None:
            raise ValueError("engine.model_dir is required for backend 'model'")
        if self.backend == "oracle" and self.drafts.acceptance == "relaxed":
            raise ValueError("engine.drafts.acceptance=relaxed needs a model: the oracle's tokens must be exact")
        return self

    @model_validator(mode="after")
    def _host_memory_is_for_prefixes(self) -> Self:
        if self.host_blocks not in (0, "auto") and not self.prefix_cache:
            raise ValueError("engine.host_blocks keeps prefixes: leave it out, or set engine.prefix_cache=true")
        return self

    @model_validator(mode="after")
    def _only_random_tokens_may_be_wrong(self) -> Self:
        if self.drafts.pinned_acceptance and not self.random_weights:
            raise ValueError(
                "engine.drafts.pinned_acceptance takes wrong tokens, for measurements: leave it out, or set"
                " engine.random_weights=true"
            )
        return self

    @property
    def bounded_step_ms(self) -> float | Literal["auto"] | None:
        """`mixed_step_ms`, with no bound for "auto" where it makes no even steps."""
        # A TP group's even steps were never measured.
        evens = (self.parallel.tp or 1) == 1 and self.prompt_share is None
        return None if self.mixed_step_ms == "auto" and not evens else self.mixed_step_ms

    def launches_ahead(self, asynchronous: bool) -> bool:
        """`overlap`, where "auto" means yes on a device that computes while the host does other things."""
        return asynchronous if self.overlap == "auto" else self.overlap == "on"

    @property
    def settled_balance(self) -> BalanceConfig:
        """`balance` with an interval that is not "auto"."""
        if self.balance.interval_steps != "auto":
            return self.balance
        # Moves between hosts were never measured over a network; experts in host memory stay where they are. Few rows
        # of one TP group are limited by the experts' bytes, and counting would take 3% of a step.
        moves = self.parallel.hosts == 1 and (self.parallel.dp or 1) > 1 and self.offload.layers == 0
        return self.balance.model_copy(update={"interval_steps": AUTO_INTERVAL if moves else None})

    @model_validator(mode="after")
    def _experts_in_host_memory_stay_where_they_are(self) -> Self:
        if self.offload.layers != 0 and isinstance(self.balance.interval_steps, int):
            raise ValueError(
                "engine.offload.layers does not go with engine.balance.interval_steps: experts in host memory do not"
                " move between ranks, leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _exact_formats_are_the_published_ones(self) -> Self:
        formats = {
            "kv_dtype": ("auto",),
            "prompt_attention_dtype": ("auto",),
            "query_weights": ("published",),
            "weights": ("auto", "quantized", "dequantized"),
        }
        for key, published in formats.items():
            if self.exact and getattr(self, key) not in published:
                raise ValueError(
                    f"engine.exact keeps the published formats, and engine.{key}={getattr(self, key)} changes one:"
                    " leave one of them out"
                )
        return self

    @model_validator(mode="after")
    def _a_step_has_a_token_for_every_request(self) -> Self:
        if self.max_requests > self.max_step_tokens:
            raise ValueError(
                "engine.max_step_tokens must be at least engine.max_requests: lower one or raise the other"
            )
        if self.max_requests * (1 + self.drafts.most) > self.max_step_tokens:
            raise ValueError(
                "engine.max_step_tokens must be at least engine.max_requests * (1 + engine.drafts.next_n):"
                " each running request computes one token and its drafts in a step (up to 5 if auto)"
            )
        return self
