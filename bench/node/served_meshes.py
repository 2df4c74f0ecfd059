"""The meshes that are compared on the same GPUs, and their load: see `bench.node.disaggregation`."""

from dataclasses import dataclass
from pathlib import Path

from capacity.shapes import DEEPSEEK_R1
from loadgen.options import LoadOptions

# What is served if no model is given.
SHAPE, EXPERTS = "r1", "w4a8"
RANGE_RATIO = 0.3
TTFT_MS = 2000.0
# For a model with all layers.
TPOT_MS = 50.0
PREFILL_STEP_TOKENS, STEP_TOKENS = 8192, 2048
MESHES = ("ifb", "aligned ifb", "divided ifb", "pd")
# How many steps prompts wait in "aligned ifb".
PROMPT_WAIT_STEPS = 8
# The fewest tokens that "divided ifb" divides, and the tokens of its steps.
DIVIDED_TOKENS, DIVIDED_STEP_TOKENS = 512, 4096


@dataclass(frozen=True)
class Options:
    rates: tuple[float, ...]
    seconds: float
    isl: int
    osl: int
    layers: int
    model: Path | None
    # Most requests that a rank runs at once.
    max_requests: int
    gpus: int = 2
    meshes: tuple[str, ...] = MESHES
    # Further settings, for all meshes.
    settings: tuple[str, ...] = ()
    # Seconds of arrivals that come first and are not counted: at least as many as an answer takes.
    warm_up_seconds: float = 0.0
    # Whether all rates send the same prompts.
    same_prompts: bool = False
    # Drafts after each token.
    next_n: int = 0
    role_changes: bool = False
    # Requests of this many seconds at the beginning and at the end of each rate do not count.
    settle_seconds: float = 0.0
    # The most milliseconds a token may take; None: in proportion to the layers.
    most_tpot_ms: float | None = None

    @property
    def tpot_ms(self) -> float:
        if self.most_tpot_ms is not None:
            return self.most_tpot_ms
        return TPOT_MS * self.layers / int(DEEPSEEK_R1["num_hidden_layers"])


def settings_of(mesh: str, options: Options) -> list[str]:
    """The mesh's settings, as for `deepmesh up --set`."""
    both = [f"engine.max_requests={options.max_requests}", f"engine.drafts.next_n={options.next_n}"]
    # What the published tables were measured with, whatever a worker would choose.
    both.append("engine.balance.redundant=0")
    if options.model is None:
        both += ["engine.random_weights=true", "engine.kv_dtype=float8_e4m3fn", "engine.context_tokens=16384"]
    decode = [f"decode.{setting}" for setting in both]
    if mesh != "pd":
        steps = PROMPT_WAIT_STEPS if mesh == "aligned ifb" else 0
        divided = mesh == "divided ifb"
        ranks = [f"parallel.dp={options.gpus}", f"parallel.prompt_wait_steps={steps}"]
        ranks.append(f"parallel.context_parallel_tokens={DIVIDED_TOKENS if divided else 'null'}")
        ranks.append(f"max_step_tokens={DIVIDED_STEP_TOKENS if divided else STEP_TOKENS}")
        return [*decode, *(f"decode.engine.{setting}" for setting in ranks), *options.settings]
    apart = f"engine.parallel.dp={options.gpus // 2}"
    prefill = [*both, f"engine.max_step_tokens={PREFILL_STEP_TOKENS}", apart]
    return [*decode, f"decode.{apart}", *(f"prefill.{setting}" for setting in prefill), *options.settings]


def load_options(
    gateway: str,
    options: Options,
    rate: float,
    number: int,
    *,
    requests: int | None = None,
    seconds: float | None = None,
) -> LoadOptions:
    """number: index of this load among those of a mesh. Each has prompts of its own, unless all are to send the same.
    requests: how many to send; if None, requests arrive for `seconds`, by default those of a rate.
    """
    return LoadOptions(
        grpc=gateway,
        warmup=0,
        seed=0 if options.same_prompts else number,
        rate=rate,
        requests=requests,
        duration_s=None if requests else seconds or options.seconds,
        isl=options.isl,
        osl=options.osl,
        range_ratio=RANGE_RATIO,
        ttft_slo_ms=TTFT_MS,
        tpot_slo_ms=options.tpot_ms,
    )
