"""From a configuration or a checkpoint's directory to a model that computes."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from engine.balance.config import BalanceConfig
from engine.balance.placement import ExpertPlacement
from engine.balance.placements import first_placements
from engine.exchange.interface import RankExchange
from engine.model.allocator import Allocator
from engine.model.config import ModelConfig, read_model_config
from engine.model.deep_ep import Traffic, find_deep_ep
from engine.model.formats.choice import Formats, choose_formats
from engine.model.model import Model
from engine.model.moe import chunk_tokens
from engine.model.mtp import SHARED_WITH_MODEL
from engine.model.quantization import AT_LOAD, PACKED_NEEDS, KeptWeights, Quantization, Stored
from engine.model.share import check_division, check_experts
from engine.parallel.layout import Group
from engine.settings.device import ResolvedEngineConfig
from engine.weights.checkpoint import load_weights
from engine.weights.nvfp4 import nvfp4_layers
from engine.weights.offloading import Offloading
from engine.weights.random_weights import fill_randomly
from engine.weights.reader import Reader
from engine.weights.shards import Shards, open_shards
from engine.weights.stored import PRE_SCALE, is_fp8, is_input_scale
from mesh.errors import CheckpointError, ConfigError
from mesh.progress import ProgressLog

_EXPERT = re.compile(r"(.*\.experts\.)\d+(\..*)")
# The tensor by which a layer's folder is recognized as an MTP module.
_MTP_MODULE = re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight")
# The matrix by which an indexer is recognized.
_INDEX_QUERY = re.compile(r"model\.layers\.(\d+)\.self_attn\.indexer\.wq_b\.weight")
# What to do about a model without what drafts need.
# Experts lie in order, and stay there.
IN_ORDER = BalanceConfig(interval_steps=None)
NO_DRAFTS = "set engine.drafts.next_n=0, or serve a checkpoint that has one"


def make_model(resolved: ResolvedEngineConfig, exchange: RankExchange | None = None) -> Model:
    """exchange: with the worker's other ranks, if there are any. Raises CheckpointError, ConfigError."""
    config = resolved.config
    assert config.model_dir is not None
    if config.sparse_prefill.offered is not None and read_model_config(config.model_dir).indexer is not None:
        raise ConfigError(
            "engine.sparse_prefill is for models whose attention is dense, and this model's indexers choose what its"
            " prompts attend to: leave it out"
        )
    make = random_model if config.random_weights else load_model
    device, dtype = torch.device(resolved.device), getattr(torch, resolved.dtype)
    return make(
        config.model_dir,
        dtype,
        device,
        resolved.weights,
        drafts=config.drafts.most,
        fp8_queries=config.query_weights == "fp8",
        exchange=exchange,
        balance=config.settled_balance,
        offloading=Offloading(resolved),
    )


def join_loading(resolved: ResolvedEngineConfig, model: Model, exchange: RankExchange) -> None:
    """In place of `make_model`, by a rank that keeps its model: take part in what ranks exchange that load theirs.

    It has no DeepEP, whose buffers all ranks make at once.
    """
    balance, layout = resolved.config.settled_balance, exchange.place.layout
    placements = _of_first_rank(first_placements(balance, layout, model.config), exchange)
    if (traffic := _traffic(model.config, placements, exchange)) is not None:
        find_deep_ep(exchange, traffic, model.device, wanted=False)


def load_model(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    weights: KeptWeights = "dequantized",
    *,
    drafts: int = 0,
    fp8_queries: bool = False,
    exchange: RankExchange | None = None,
    balance: BalanceConfig | None = None,
    offloading: Offloading | None = None,
) -> Model:
    """Read a checkpoint into a new model of `dtype`, with as many of its modules that draft as `drafts` may need.

    fp8_queries: if weights are kept quantized, multiply those queries' projections in FP8 that are published plain.
    exchange: with the worker's other ranks, of whose model this is a share; offloading: which experts lie in host
    memory, by default none. Raises CheckpointError, and ConfigError if the ranks cannot divide it or memory cannot hold
    it.
    """
    config = _with_drafts(read_model_config(model_dir), drafts)
    with open_shards(model_dir) as shards:
        _check_draft_module(config, shards)
        _check_indexers(config, shards)
        config = settle(config, shards)
        allocate = make_allocator(config, dtype, device, weights, exchange, fp8_queries, balance)
        model = _make(config, allocate, offloading)
        # The ranks of a worker read shares of one size at one time: the first speaks for all.
        quiet = exchange is not None and exchange.place.rank > 0
        elsewhere = _on_other_ranks(model)
        reader = Reader(shards, device)
        load_weights(reader, list(model.parts()), unused=_prefixes(config, shards), elsewhere=elsewhere, quiet=quiet)
    return model


def random_model(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    weights: KeptWeights = "dequantized",
    *,
    drafts: int = 0,
    fp8_queries: bool = False,
    exchange: RankExchange | None = None,
    balance: BalanceConfig | None = None,
    offloading: Offloading | None = None,
) -> Model:
    """The model that `config.json` describes, with weights drawn on the device. Raises CheckpointError."""
    config = _with_drafts(read_model_config(model_dir), drafts)
    model = _make(config, make_allocator(config, dtype, device, weights, exchange, fp8_queries, balance), offloading)
    parts = list(model.parts())
    logged = ProgressLog("drawing weights", len(parts))
    for index, part in enumerate(parts):
        fill_randomly(part.parameters, device, seed=index)
        part.finish()
        logged.advance()
    return model


def settle(config: ModelConfig, shards: Shards) -> ModelConfig:
    """Complete the configuration by what only the tensors say: whether gates and the weights of indexers' heads are in
    float32 and indexers plain, which scales INT4 experts have in addition to those of their weights, and what is in
    NVFP4. Raises CheckpointError if layers that should be alike differ.
    """
    indexers = [entry for name, entry in shards.entries.items() if _INDEX_QUERY.fullmatch(name)]
    if config.quantization.linear is Stored.FP8 and not all(map(is_fp8, indexers)):
        config = replace(config, quantization=replace(config.quantization, plain_indexers=True))
    gates = (entry for name, entry in shards.entries.items() if name.endswith(".mlp.gate.weight"))
    weights = (entry for name, entry in shards.entries.items() if name.endswith(".indexer.weights_proj.weight"))
    config = replace(
        config,
        float32_gates=any(gate.dtype == "F32" for gate in gates),
        float32_index_weights=any(entry.dtype == "F32" for entry in weights),
    )
    quantization = config.quantization
    if quantization.experts is Stored.NVFP4:
        layers = config.num_hidden_layers
        drafts = nvfp4_layers(shards, range(layers, config.kv_layers)) if config.draft_layers else None
        return replace(config, quantization=nvfp4_layers(shards, range(layers)), draft_quantization=drafts)
    if quantization.experts is not Stored.INT4:
        return config
    settled = replace(
        quantization,
        static_inputs=any(is_input_scale(name) for name in shards.entries),
        pre_scaled=any(name.endswith(f".{PRE_SCALE}") for name in shards.entries),
    )
    return replace(config, quantization=settled)


def make_allocator(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    weights: KeptWeights,
    exchange: RankExchange | None = None,
    fp8_queries: bool = False,
    balance: BalanceConfig | None = None,
) -> Allocator:
    """Raises ConfigError if the ranks cannot divide the model, or its weights cannot be kept so."""
    published = config.quantization
    if published.packed and weights == "quantized":
        raise ConfigError(PACKED_NEEDS)
    already = replace(published, power_scales=False) == AT_LOAD.get(weights)
    if weights in AT_LOAD and not published.takes_rounding and not already:
        raise ConfigError(f"engine.weights={weights} quantizes plain weights, and the checkpoint's are quantized")

    def formats_of(stored: Quantization) -> Formats:
        return choose_formats(
            stored,
            dtype,
            dequantize=weights == "dequantized",
            fp8_queries=fp8_queries,
            float32_gates=config.float32_gates,
            float32_index_weights=config.float32_index_weights,
            at_load=stored.kept(weights) if weights in AT_LOAD else None,
        )

    drafts = config.draft_quantization or published
    placements: dict[int, ExpertPlacement] = {}
    deep_ep = None
    if exchange is not None:
        layout, kept = exchange.place.layout, published.kept(weights)
        queries_in_fp8 = fp8_queries and weights != "dequantized"
        check_division(config, layout.tp, blocks=queries_in_fp8 or kept.has_blocks)
        check_experts(config, layout, blocks=kept.experts is not Stored.PLAIN)
        placements = _of_first_rank(first_placements(balance or IN_ORDER, layout, config), exchange)
        if (traffic := _traffic(config, placements, exchange)) is not None:
            deep_ep = find_deep_ep(exchange, traffic, device)
    formats, of_drafts = formats_of(published), formats_of(drafts)
    return Allocator(dtype, device, formats, exchange, of_drafts, placements, deep_ep)


def _make(config: ModelConfig, allocate: Allocator, offloading: Offloading | None) -> Model:
    return Model(config, allocate if offloading is None else offloading.offloaded(config, allocate))


def _of_first_rank(own: Mapping[int, ExpertPlacement], exchange: RankExchange) -> dict[int, ExpertPlacement]:
    """The first rank's placements, on every rank: another worker may write the file while the ranks read it."""
    if not own:
        return {}
    experts = torch.tensor([placement.experts for placement in own.values()])
    first = exchange.broadcast(experts, Group.WORLD, 0).tolist()
    return {
        layer: ExpertPlacement(tuple(held), placement.parts)
        for (layer, placement), held in zip(own.items(), first, strict=True)
    }


def _traffic(config: ModelConfig, placements: Mapping[int, ExpertPlacement], exchange: RankExchange) -> Traffic | None:
    """What DeepEP's buffer is made for; None if layers have unlike numbers of experts. MTP modules have no copies of
    theirs unless experts do not divide.
    """
    layers = range(min(config.first_k_dense_replace, config.kv_layers), config.kv_layers)
    slots = {len(placements[layer].experts) if layer in placements else config.n_routed_experts for layer in layers}
    if len(slots) != 1:
        return None
    ranks = exchange.place.layout.world
    return Traffic(config.hidden_size, slots.pop(), config.num_experts_per_tok, chunk_tokens(ranks))


def _with_drafts(config: ModelConfig, drafts: int) -> ModelConfig:
    if drafts and not config.num_nextn_predict_layers:
        raise CheckpointError(f"config.json describes no MTP module (num_nextn_predict_layers is 0): {NO_DRAFTS}")
    return replace(config, draft_layers=min(config.num_nextn_predict_layers, drafts))


def _check_draft_module(config: ModelConfig, shards: Shards) -> None:
    for layer in range(config.num_hidden_layers, config.kv_layers):
        prefix = f"model.layers.{layer}."
        if not any(name.startswith(prefix) for name in shards.entries):
            raise CheckpointError(f"the checkpoint holds no MTP module ({prefix}*): {NO_DRAFTS}")


def _check_indexers(config: ModelConfig, shards: Shards) -> None:
    wanted = [layer for layer in range(config.kv_layers) if config.has_indexer(layer)]
    found = {int(match[1]) for name in shards.entries if (match := _INDEX_QUERY.fullmatch(name)) is not None}
    if lacking := [layer for layer in wanted if layer not in found]:
        raise CheckpointError(
            f"the checkpoint holds no indexer for {len(lacking)} of {len(wanted)} layers (the first is"
            f" model.layers.{lacking[0]}.self_attn.indexer.*), and its config.json describes sparse attention: download"
            " the model's own files again"
        )


def _prefixes(config: ModelConfig, shards: Shards) -> tuple[str, ...]:
    """Prefixes of the names of tensors that are not read: layers not computed, MTP modules that config.json does not
    count, and copies of shared tensors.
    """
    drafting = range(config.num_hidden_layers, config.kv_layers)
    copies = [f"model.layers.{layer}.{name}" for layer in drafting for name in SHARED_WITH_MODEL]
    not_computed = [f"model.layers.{layer}." for layer in config.unused_layers]
    return (*copies, *not_computed, *undescribed_modules(config, shards))


def undescribed_modules(config: ModelConfig, shards: Shards) -> tuple[str, ...]:
    """Prefixes of the names of MTP modules that config.json does not count, as where it says that there are 0."""
    layers = [int(match[1]) for name in shards.entries if (match := _MTP_MODULE.fullmatch(name)) is not None]
    return tuple(f"model.layers.{layer}." for layer in layers if layer >= config.unused_layers.stop)


def _on_other_ranks(model: Model) -> set[str]:
    """The names of routed experts' tensors that this rank does not hold, derived from those that it holds."""
    held = {parameter.name for parameter in model.parameters()}
    found = {match for name in held if (match := _EXPERT.fullmatch(name)) is not None}
    experts = range(model.config.n_routed_experts)
    return {f"{match[1]}{expert}{match[2]}" for match in found for expert in experts} - held
