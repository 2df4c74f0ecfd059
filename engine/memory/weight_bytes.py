"""Bytes of the weights that a rank holds, reckoned from config.json alone, before torch is loaded.

The launcher and a worker's service compare them with the cards before any rank starts. `engine.weights.sizes` counts
the same on the model itself; a test compares the two.
"""

from dataclasses import dataclass, replace

from engine.model.config import ModelConfig
from engine.model.quantization import WEIGHT_BLOCK, KeptWeights, LinearKind, Quantization, Stored
from engine.model.share import check_division, check_experts
from engine.parallel.layout import Layout

BF16, FLOAT32 = 2, 4
# Outputs of an FP8 product come in tiles of 64, and both dimensions of NVFP4's in multiples of it.
TILE = 64
# NVFP4: two weights a byte, an e4m3 scale for each 16, and a float32 scale for each published matrix.
NVFP4_GROUP = 16
# Static scales of the inputs of an expert's three matrices.
STATIC_SCALES_BYTES = 3 * FLOAT32


@dataclass(frozen=True)
class WeightBytes:
    """What one rank holds. `layer_experts`: of one layer, shared ones included where they are computed with the routed
    ones; all layers with experts have as many. `copy`: one routed expert of one layer.
    """

    layer_experts: int
    expert_layers: int
    # MTP modules whole, with their experts.
    drafts: int
    # All else: attention, dense layers, shared experts that are apart, gates, vocabulary.
    rest: int
    copy: int

    @property
    def total(self) -> int:
        return self.layer_experts * self.expert_layers + self.drafts + self.rest

    def with_copies(self, copies: int) -> "WeightBytes":
        """With room for this many copies of experts in each of the model's layers."""
        return replace(self, layer_experts=self.layer_experts + copies * self.copy)


def weight_bytes(config: ModelConfig, layout: Layout, weights: KeptWeights = "quantized") -> WeightBytes:
    """The weights of a rank of this layout, kept like that; of as many MTP modules as `config.draft_layers`.

    Raises ConfigError if the ranks cannot divide the model.
    """
    stored = config.quantization
    kept = stored.kept(weights)
    check_division(config, layout.tp, blocks=kept.has_blocks)
    check_experts(config, layout, blocks=kept.experts is not Stored.PLAIN)
    model = _Rank(config, layout, kept, expands_in_fp8=weights == "quantized" and stored.linear is Stored.FP8)
    layers = config.num_hidden_layers
    dense = sum(map(config.is_dense, range(layers)))
    apart = model.expert_layer - model.layer_experts
    vocabulary = BF16 * config.vocab_size // layout.tp * config.hidden_size
    rest = dense * model.dense_layer + (layers - dense) * apart + 2 * vocabulary + BF16 * config.hidden_size
    rest += sum(map(config.has_indexer, range(layers))) * model.indexer
    drafting = model
    if config.draft_quantization is not None:
        drafting = replace(model, kept=config.draft_quantization.kept(weights), expands_in_fp8=False)
    return WeightBytes(
        layer_experts=model.layer_experts,
        expert_layers=layers - dense,
        drafts=config.draft_layers * drafting.draft_module,
        rest=rest,
        copy=model.expert,
    )


@dataclass(frozen=True)
class _Rank:
    """Sizes in bytes of the parts of one rank's model."""

    config: ModelConfig
    layout: Layout
    kept: Quantization
    # Whether keys and values are expanded from latents with the published FP8 weight, which is then kept twice.
    expands_in_fp8: bool

    @property
    def dense_layer(self) -> int:
        return self._attention + self._feed_forward(self.config.intermediate_size // self.layout.tp)

    @property
    def expert_layer(self) -> int:
        config, layout = self.config, self.layout
        gate = config.n_routed_experts * (BF16 * config.hidden_size + FLOAT32 * (config.topk_method == "noaux_tc"))
        size = self._attention + gate + self.layer_experts
        if self._joined:
            return size
        width = config.n_shared_experts * config.moe_intermediate_size
        size += self._feed_forward(width)
        # A rank of a worker that is one TP group has a copy of its share, for few rows that all ranks have.
        if layout.tp > 1 and layout.dp == 1 and width % (layout.tp * WEIGHT_BLOCK) == 0:
            size += self._feed_forward(width // layout.tp)
        return size

    @property
    def layer_experts(self) -> int:
        # If experts do not divide evenly, each part has room for its share rounded up.
        return (-(-self.config.n_routed_experts // self.layout.ep) + self._joined) * self.expert

    @property
    def draft_module(self) -> int:
        hidden = self.config.hidden_size
        return self.expert_layer + self.indexer + BF16 * hidden * (3 + 2 * hidden // self.layout.tp)

    @property
    def indexer(self) -> int:
        """The indexer of a layer, which every rank has whole; 0 if the model has none."""
        index, hidden = self.config.indexer, self.config.hidden_size
        if index is None or self.config.q_lora_rank is None:
            return 0
        size = self._linear(LinearKind.INDEX, (index.heads * index.width,), self.config.q_lora_rank)
        size += self._linear(LinearKind.INDEX, (index.width,), hidden)
        return size + FLOAT32 * 2 * index.width + BF16 * index.heads * hidden

    @property
    def expert(self) -> int:
        hidden, width = self.config.hidden_size, self.config.moe_intermediate_size // self.layout.width_parts
        form, shapes = self.kept.experts, ((2 * width, hidden), (hidden, width))
        if form is Stored.INT4 and hidden % WEIGHT_BLOCK == width % WEIGHT_BLOCK == 0:
            # Two weights a byte, and a bfloat16 scale for each group.
            size = sum(rows * inputs // 2 + BF16 * rows * (inputs // self.kept.group) for rows, inputs in shapes)
            return size + (STATIC_SCALES_BYTES if self.kept.static_inputs else 0)
        if form is Stored.NVFP4 and hidden % TILE == width % TILE == 0:
            return sum(_nvfp4(rows, inputs) for rows, inputs in shapes) + 3 * FLOAT32
        if form is Stored.FP8 and hidden % WEIGHT_BLOCK == width % WEIGHT_BLOCK == 0:
            return sum(_fp8(rows, inputs) for rows, inputs in shapes)
        return sum(BF16 * rows * inputs for rows, inputs in shapes)

    @property
    def _joined(self) -> int:
        """How many shared experts are computed with the routed ones."""
        kept = self.kept
        apart = kept.experts is Stored.NVFP4 or kept.experts is not kept.linear_of(LinearKind.FEED_FORWARD)
        return 0 if apart or self.layout.world > 1 else self.config.n_shared_experts

    @property
    def _attention(self) -> int:
        """Attention, with the norms of its layer."""
        config = self.config
        hidden, latent = config.hidden_size, config.kv_lora_rank
        heads = config.num_attention_heads // self.layout.tp
        queries = heads * config.qk_head_dim
        inner = config.q_lora_rank or queries
        size = self._linear(LinearKind.INPUT, (inner, config.latent_dim), hidden)
        if config.q_lora_rank:
            size += self._linear(LinearKind.QUERY, (queries,), config.q_lora_rank) + BF16 * config.q_lora_rank
        rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
        size += BF16 * rows * latent
        if self.expands_in_fp8 and rows % WEIGHT_BLOCK == latent % WEIGHT_BLOCK == 0:
            size += _fp8(rows, latent)
        size += self._linear(LinearKind.OUTPUT, (hidden,), heads * config.v_head_dim)
        return size + BF16 * (latent + 2 * hidden)

    def _feed_forward(self, width: int) -> int:
        hidden = self.config.hidden_size
        gate_up = self._linear(LinearKind.FEED_FORWARD, (width, width), hidden)
        return gate_up + self._linear(LinearKind.FEED_FORWARD, (hidden,), width)

    def _linear(self, kind: LinearKind, parts: tuple[int, ...], inputs: int) -> int:
        """A weight that joins published matrices; parts: their rows. A shape that the format does not take is plain."""
        rows, form = sum(parts), self.kept.linear_of(kind)
        in_blocks = inputs % WEIGHT_BLOCK == 0 and not any(part % WEIGHT_BLOCK for part in parts[:-1])
        if form is Stored.FP8 and in_blocks and rows % TILE == 0:
            return _fp8(rows, inputs)
        if form is Stored.NVFP4 and len(set(parts)) == 1 and parts[0] % TILE == inputs % TILE == 0:
            return _nvfp4(rows, inputs) + FLOAT32 * len(parts)
        return BF16 * rows * inputs


def _fp8(rows: int, inputs: int) -> int:
    return rows * inputs + -(-rows // WEIGHT_BLOCK) * (inputs // WEIGHT_BLOCK) * FLOAT32


def _nvfp4(rows: int, inputs: int) -> int:
    return rows * inputs // 2 + rows * inputs // NVFP4_GROUP
