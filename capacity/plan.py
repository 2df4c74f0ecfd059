"""Whether a model fits, and then its tokens of KV, requests, predicted time per token and requests a minute.

The predicted time of a step is its floor (bytes and FLOPs at the rates that the card keeps up) times the ratio of a
measured engine's step to its own floor, with the same number of requests. For the measured layout the prediction is the
measurement itself. Prompts are computed as much faster or slower than on the measured card as the card's FLOP rate is
higher or lower. No step is shorter than the copy of the experts that lie in host memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

import msgspec

from capacity.cards import H200, Gpu, find_gpu
from capacity.floor import BF16, decode_floor, decode_operations
from capacity.memory import Weights, weights_of
from capacity.shapes import SHAPES
from engine.balance.placement import slots_of
from engine.config import EngineConfig
from engine.memory.rank_memory import POOL_SHARE, RankMemory, reckon
from engine.model.config import ModelConfig, parse_model_config
from engine.model.masked_rows import selection_in_expanded_keys
from engine.model.quantization import AT_LOAD, KeptWeights, Stored
from engine.offload.choice import MemoryNeed, fewest_layers
from engine.offload.config import OffloadConfig
from engine.settings.card import Card
from engine.settings.device import kept_weights
from engine.settings.products import check_products, multiplies
from engine.settings.resolve import resolve_settings
from mesh.blocks import BLOCK_TOKENS
from mesh.cost_file import CostFile
from mesh.costs import CostModel
from mesh.domain.workers import WorkerRole
from mesh.errors import ConfigError

# The layout and the card that the shipped cost files were measured on.
MEASURED_SHAPE, MEASURED_GPU = "r1-ep8-rank", "h200"
# Steps of a plan's cost model are predicted at these numbers of requests.
GRID = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
# Tokens of the steps of a worker that has experts in host memory.
STEP_TOKENS = 16384
SLOTS = OffloadConfig().slots


@dataclass(frozen=True)
class Asked:
    """What to plan for; `kv_item_bytes` is 2 for bf16 and 1 for FP8, `offloaded` the layers whose experts lie in host
    memory, `weights` the form to which they are quantized when they are loaded, or as published.
    """

    gpu: str
    gpus: int
    prompt_tokens: int
    output_tokens: int
    tpot_ms: float | None = None
    kv_item_bytes: int = 2
    offloaded: int = 0
    weights: KeptWeights = "quantized"


@dataclass(frozen=True)
class Plan:
    """Figures of one worker on `gpus` GPUs. `requests` and rates are 0 if it does not fit."""

    weights_bytes: float
    experts_bytes: float
    # Bytes of the experts that lie in host memory.
    host_bytes: float
    # Weights and one request fit if this many layers' experts are in host memory; None if they never fit.
    offload_needed: int | None
    # Memory left for KV. If it is negative, the GPU lacks so much.
    free_bytes: float
    kv_token_bytes: int
    kv_tokens: int
    # Requests at once on each GPU, and what bounds their number.
    requests: int
    bound: str
    tpot_ms: float
    decode_per_minute: float
    prefill_per_minute: float
    # Requests a minute if the same GPUs compute prompts and tokens.
    both_per_minute: float
    costs: CostFile
    # The most requests for which a step was measured.
    measured_requests: int
    gpu: Gpu

    @property
    def fits(self) -> bool:
        return self.kv_tokens > 0 and self.requests > 0


def plan(config: ModelConfig, asked: Asked) -> Plan:
    """Weights that another tool packed are planned as they are once quantized to W4A8, which a GPU needs.

    GPUs that do not divide the experts evenly each hold as many as the largest share, copies of others among them.
    Raises ConfigError for an unknown GPU, for more GPUs than experts, for a number of layers that cannot be offloaded,
    for quantized weights that are to be quantized when they are loaded, or for a form that the
    card does not multiply.
    """
    asked = replace(asked, gpu=asked.gpu.lower())
    gpu = find_gpu(asked.gpu)
    if not 0 < asked.gpus <= config.n_routed_experts:
        most = config.n_routed_experts
        raise ConfigError(f"--gpus {asked.gpus}: expected one to {most}, as many as the model has experts")
    if asked.weights != "quantized" and not config.quantization.takes_rounding:
        raise ConfigError(
            f"--weights {asked.weights}: only plain weights are quantized, and the checkpoint's are already"
        )
    kept: KeptWeights = "w4a8" if config.quantization.packed and asked.weights == "quantized" else asked.weights
    config = replace(config, quantization=config.quantization.kept(kept))
    check_products(config.quantization, _card(asked, gpu))
    whole = weights_of(config, asked.gpus)
    weights = replace(whole, offloaded=asked.offloaded, slots=SLOTS if asked.offloaded else 0)
    if asked.offloaded and not SLOTS < asked.offloaded <= weights.expert_layers:
        raise ConfigError(
            f"--offload {asked.offloaded}: expected {SLOTS + 1} to {weights.expert_layers} layers, of which the GPU has"
            f" room for {SLOTS} at a time, or 0"
        )
    memory = _memory(config, asked, gpu, asked.offloaded)
    blocks, token_bytes = memory.blocks, config.kv_token_bytes(asked.kv_item_bytes)
    file = _predicted_costs(config, asked, gpu, weights.host / gpu.link_rate)
    costs = file.costs
    each_blocks = -(-(asked.prompt_tokens + asked.output_tokens) // BLOCK_TOKENS)
    requests, bound = blocks // each_blocks, "KV memory"
    if asked.tpot_ms is not None and (within := costs.requests_within(asked.tpot_ms, max(1, requests))) < requests:
        requests, bound = within, f"{asked.tpot_ms:g} ms a token"
    step_ms = costs.decode_ms(requests) if requests else 0.0
    prompt_ms = costs.prefill_ms(asked.prompt_tokens)
    decode_ms = asked.output_tokens * step_ms / requests if requests else 0.0
    minute = 60_000 * asked.gpus * bool(requests)
    return Plan(
        weights_bytes=weights.total,
        experts_bytes=weights.experts,
        host_bytes=weights.host,
        offload_needed=_offload_needed(config, asked, whole, each_blocks * BLOCK_TOKENS * token_bytes, gpu),
        free_bytes=(memory.there - memory.taken) * (POOL_SHARE if blocks else 1),
        kv_token_bytes=token_bytes,
        kv_tokens=blocks * BLOCK_TOKENS,
        requests=requests,
        bound=bound,
        tpot_ms=step_ms,
        decode_per_minute=minute / decode_ms if decode_ms else 0.0,
        prefill_per_minute=minute / prompt_ms,
        both_per_minute=minute / (decode_ms + prompt_ms),
        costs=file,
        measured_requests=int(shipped_costs(_file_name(config)).costs.decode_steps[-1][0]),
        gpu=gpu,
    )


def forms_that_fit(config: ModelConfig, asked: Asked) -> Sequence[KeptWeights]:
    """To which of the forms that the card has products for plain weights may be quantized while they are loaded, so
    that they fit.
    """
    if asked.weights != "quantized" or config.quantization.quantized:
        return ()
    card = _card(asked, find_gpu(asked.gpu.lower()))
    forms = [form for form, kept in AT_LOAD.items() if multiplies(kept, card)]
    return [form for form in forms if plan(config, replace(asked, weights=form)).fits]


def _predicted_costs(config: ModelConfig, asked: Asked, gpu: Gpu, copy_seconds: float) -> CostFile:
    """The cost model of one of the worker's GPUs. copy_seconds: time to copy the experts that every step copies."""
    measured = shipped_costs(_file_name(config))
    context = asked.prompt_tokens + asked.output_tokens // 2
    ours = replace(config, n_routed_experts=slots_of(config.n_routed_experts, asked.gpus, 0))
    theirs = _measured_config(config.quantization.experts)
    measured_item_bytes = 1 if measured.format.endswith("fp8 KV") else 2
    steps = []
    for requests in GRID:
        beyond = measured.costs.decode_ms(requests) / _floor_ms(
            theirs, requests, int(measured.costs.decode_context_tokens), measured_item_bytes, H200
        )
        own_ms = beyond * _floor_ms(ours, requests, context, asked.kv_item_bytes, gpu)
        steps.append((float(requests), max(own_ms, 1000 * copy_seconds)))
    attended, scored = _pair_flops(ours)
    pair_ms = (
        measured.costs.prefill_pairs_ms / _pair_flops(theirs)[0] / (gpu.ceilings.bf16_flops / H200.ceilings.bf16_flops)
    )
    speed = gpu.ceilings.fp8_flops / H200.ceilings.fp8_flops
    prefill_rate = measured.costs.prefill_tokens_per_second * speed * _flops(theirs) / _flops(ours)
    costs = msgspec.structs.replace(
        measured.costs,
        decode_steps=tuple(steps),
        decode_context_tokens=float(context),
        prefill_tokens_per_second=min(prefill_rate, STEP_TOKENS / copy_seconds) if copy_seconds else prefill_rate,
        prefill_pairs_ms=attended * pair_ms,
        **_selection(ours, measured.costs, scored * pair_ms),
    )
    layout = f"experts over {asked.gpus} GPUs, all else on each"
    return CostFile(costs, asked.gpu, "", layout, measured.format, f"predicted from: {measured.source}", measured.error)


def _pair_flops(config: ModelConfig) -> tuple[float, float]:
    """FLOPs in which a prompt's token attends to an earlier one, and in which indexers score it: the latter counted as
    half, since they are in FP8.
    """
    layers, index = config.num_hidden_layers, config.indexer
    scored = 0.0 if index is None else 2 * layers * index.heads * index.width / 2
    return 2 * layers * config.num_attention_heads * (config.qk_head_dim + config.v_head_dim), scored


def _selection(config: ModelConfig, measured: CostModel, index_pairs_ms: float) -> dict[str, float]:
    """What the cost model of a model with indexers has in addition: keys are read as fast as latents were."""
    index = config.indexer
    if index is None:
        return {}
    share = index.key_bytes(1) / (config.latent_dim * BF16)
    return {
        "selected_tokens": float(index.top_k),
        "prompt_selected_tokens": float(selection_in_expanded_keys(config)),
        "index_context_ms": measured.decode_context_ms * share,
        "index_pairs_ms": index_pairs_ms,
    }


def _memory(config: ModelConfig, asked: Asked, gpu: Gpu, offloaded: int) -> RankMemory:
    """What a GPU holds of a worker with the settings that it would choose, without drafts: their steps are not
    predicted. A worker that has experts in host memory computes prompts, in the largest steps.
    """
    settings: dict[str, object] = {"parallel": {"dp": asked.gpus, "ep": asked.gpus}}
    if asked.kv_item_bytes == 1:
        settings["kv_dtype"] = "float8_e4m3fn"
    if offloaded:
        settings |= {"max_step_tokens": STEP_TOKENS, "offload": {"layers": offloaded}}
    engine = EngineConfig.model_validate({"model_dir": "planned", **settings})
    card = _card(asked, gpu)
    chosen = resolve_settings(engine, WorkerRole.DECODE, config, [card], drafts=False).engine
    return reckon(config, card, chosen, kept_weights(chosen, "cuda"))


def _card(asked: Asked, gpu: Gpu) -> Card:
    return Card(asked.gpu, int(gpu.memory_bytes), gpu.capability)


def _offload_needed(config: ModelConfig, asked: Asked, weights: Weights, request_bytes: int, gpu: Gpu) -> int | None:
    if weights.expert_layers <= SLOTS:
        return None
    memory = _memory(config, asked, gpu, weights.expert_layers)
    need = MemoryNeed(
        weights=weights.total,
        layer_experts=weights.layer_experts,
        work=memory.taken - memory.weights,
        kv=int(request_bytes / POOL_SHARE),
        free=int(gpu.memory_bytes),
    )
    try:
        return fewest_layers(need, SLOTS, weights.expert_layers)
    except ConfigError:
        return None


def shipped_costs(name: str) -> CostFile:
    """A cost file that comes with deepmesh."""
    return msgspec.json.decode((files("capacity") / "measured" / name).read_bytes(), type=CostFile)


def _file_name(config: ModelConfig) -> str:
    experts = "w4a8" if config.quantization.experts is Stored.INT4 else "fp8"
    return f"{MEASURED_GPU}-r1-ep8-{experts}.json"


def _measured_config(experts: Stored) -> ModelConfig:
    config = parse_model_config(SHAPES[MEASURED_SHAPE])
    return replace(config, quantization=replace(config.quantization, experts=experts))


def _floor_ms(config: ModelConfig, requests: int, context: int, item_bytes: int, gpu: Gpu) -> float:
    return decode_floor(decode_operations(config, requests, context, item_bytes), gpu.ceilings) * 1000


def _flops(config: ModelConfig) -> float:
    """FLOPs of a token, without attention to other tokens."""
    return sum(operation.flops for operation in decode_operations(config, 1, 0, 2))
