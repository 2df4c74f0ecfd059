"""The floor of a step: the time of its operations if each moves its bytes, or computes its FLOPs, at the ceilings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from capacity.ceilings import Ceilings
from engine.model.config import ModelConfig
from engine.model.indexer_config import IndexerConfig
from engine.model.quantization import LinearKind, Stored
from engine.model.tensor_group import FEW_ROWS
from engine.parallel.layout import Layout

ALONE = Layout()
BF16, FP8 = 2, 1
# Bytes of a weight: two weights a byte, and an e4m3 scale for each 16. Products have bfloat16 operands.
NVFP4 = 1 / 2 + 1 / 16
ITEM_BYTES: Mapping[Stored, float] = MappingProxyType({Stored.PLAIN: BF16, Stored.FP8: FP8, Stored.NVFP4: NVFP4})


def int4_bytes(group: int) -> float:
    """Bytes of a weight: two weights a byte, and a bfloat16 scale for each group of inputs."""
    return 1 / 2 + BF16 / group


@dataclass(frozen=True)
class Operation:
    """One operation, summed over all layers.

    `size_bytes` counts weights and KV, each read once, and only experts that rows use. Activations do not count, since
    those of a step fit the second-level cache.
    """

    name: str
    size_bytes: float
    flops: float
    # Whether the product may have FP8 operands.
    fp8: bool

    def seconds(self, ceilings: Ceilings) -> float:
        return ceilings.seconds(self.size_bytes, self.flops, fp8=self.fp8)


def decode_operations(
    config: ModelConfig, rows: int, context: int, kv_item_bytes: int, drafts: int = 0, layout: Layout = ALONE
) -> list[Operation]:
    """The operations of one rank in a step with one token of each of `rows` requests of its TP group and `drafts`
    drafts after each token, with contexts of `context` tokens. All other ranks compute as much at the same time.
    """
    layers = config.num_hidden_layers
    dense = sum(config.is_dense(layer) for layer in range(layers))
    tokens, width = rows * (1 + drafts), config.intermediate_size // layout.tp
    attention = _attention(config, rows, context, kv_item_bytes, 1 + drafts, layout.tp)
    return [
        *(_times(each, layers) for each in attention),
        *(_times(each, dense) for each in _feed_forward("dense", config, tokens, width)),
        *(_times(each, layers - dense) for each in _experts(config, tokens, layout)),
        _product("head", tokens, config.hidden_size, config.vocab_size // layout.tp),
    ]


def guess_operations(
    config: ModelConfig, rows: int, context: int, kv_item_bytes: int, drafts: int, layout: Layout = ALONE
) -> Iterator[Operation]:
    """The operations of one rank that guess `drafts` tokens after the drawn ones: the MTP module, once for each guess.

    Its first run computes all tokens that the model computed in the step, later runs one token a row.
    """
    for number in range(drafts):
        queries = 1 if number else 1 + drafts
        tokens, hidden = rows * queries, config.hidden_size
        yield _product("draft merge", tokens, 2 * hidden, hidden // layout.tp)
        yield from _attention(config, rows, context, kv_item_bytes, queries, layout.tp)
        yield from _experts(config, tokens, layout)
        yield _product("draft head", rows, hidden, config.vocab_size // layout.tp)


def decode_floor(operations: list[Operation], ceilings: Ceilings) -> float:
    """Seconds of all operations, one after another."""
    return sum(operation.seconds(ceilings) for operation in operations)


def _attention(
    config: ModelConfig, requests: int, context: int, kv_item_bytes: int, queries: int = 1, tp: int = 1
) -> Iterator[Operation]:
    """Attention's operations. All `queries` queries of a request read its KV together, once."""
    rows = requests * queries
    heads, hidden, latent = config.num_attention_heads // tp, config.hidden_size, config.kv_lora_rank
    # Queries come from what a first projection compressed, or directly from the hidden state.
    inner = config.q_lora_rank or hidden
    forms = config.quantization
    yield _product(
        "attention input",
        rows,
        hidden,
        (config.q_lora_rank or 0) + config.latent_dim,
        forms.linear_of(LinearKind.INPUT),
    )
    yield _product("attention queries", rows, inner, heads * config.qk_head_dim, forms.linear_of(LinearKind.QUERY))
    for name, width in (("absorb", config.qk_nope_head_dim), ("expand", config.v_head_dim)):
        one = _product(f"attention {name}", rows, width, latent)
        yield _times(one, heads)
    if config.indexer is not None:
        yield from _indexing(config, config.indexer, requests, context, rows)
    # If queries of a request select differently, each reads its own tokens.
    attended = context if config.indexer is None else min(context, config.indexer.top_k)
    readers = requests if attended == context else rows
    kv_bytes = readers * attended * config.latent_dim * kv_item_bytes
    flops = 2 * rows * heads * attended * (config.latent_dim + latent)
    yield Operation("attention", kv_bytes, flops, fp8=kv_item_bytes == FP8)
    yield _product("attention output", rows, heads * config.v_head_dim, hidden, forms.linear_of(LinearKind.OUTPUT))


def _indexing(config: ModelConfig, index: IndexerConfig, requests: int, context: int, rows: int) -> Iterator[Operation]:
    """What every rank of a TP group computes to select tokens: scores of all that queries see, if not all are selected.
    Layers that share another's choice count as if they had their own.
    """
    form = config.quantization.linear_of(LinearKind.INDEX)
    yield _product("index queries", rows, config.q_lora_rank or 0, index.heads * index.width, form)
    yield _product("index keys", rows, config.hidden_size, index.width, form)
    if context > index.top_k:
        flops = 2 * rows * context * index.heads * index.width
        yield Operation("index scores", requests * context * index.key_bytes(FP8), flops, fp8=True)


def _feed_forward(name: str, config: ModelConfig, rows: float, width: int) -> Iterator[Operation]:
    form = config.quantization.linear_of(LinearKind.FEED_FORWARD)
    yield _product(f"{name} gate and up", rows, config.hidden_size, 2 * width, form)
    yield _product(f"{name} down", rows, width, config.hidden_size, form)


def _experts(config: ModelConfig, rows: int, layout: Layout = ALONE) -> Iterator[Operation]:
    own_rows, all_rows = rows / layout.tp, rows * layout.dp
    yield _product("gate", own_rows, config.hidden_size, config.n_routed_experts)
    shared = config.moe_intermediate_size * config.n_shared_experts
    if layout.tp > 1 and layout.dp == 1 and rows <= FEW_ROWS:
        # Every rank has all rows, and a part of the expert's width.
        yield from _feed_forward("shared", config, rows, shared // layout.tp)
    else:
        yield from _feed_forward("shared", config, own_rows, shared)
    chosen, held = config.num_experts_per_tok, config.n_routed_experts / layout.ep
    # The expected number of this rank's experts that are chosen if choices are uniformly random. A rank alone, as one
    # of many is counted, may have fewer experts than a row chooses.
    touched = held * (1 - (1 - min(1, chosen / config.n_routed_experts)) ** all_rows)
    form = config.quantization.experts
    item_bytes = int4_bytes(config.quantization.group) if form is Stored.INT4 else ITEM_BYTES[form]
    pairs, hidden = all_rows * chosen / layout.ep, config.hidden_size
    width = config.moe_intermediate_size // layout.width_parts
    for name, inputs, outputs in (("gate and up", hidden, 2 * width), ("down", width, hidden)):
        size_bytes = touched * inputs * outputs * item_bytes
        yield Operation(f"experts {name}", size_bytes, 2 * pairs * inputs * outputs, _is_fp8(form))


def _product(name: str, rows: float, inputs: int, outputs: int, form: Stored = Stored.PLAIN) -> Operation:
    return Operation(name, inputs * outputs * ITEM_BYTES[form], 2 * rows * inputs * outputs, _is_fp8(form))


def _is_fp8(form: Stored) -> bool:
    """Whether weights of this form are multiplied in FP8."""
    return form in (Stored.FP8, Stored.INT4)


def _times(operation: Operation, count: int) -> Operation:
    return Operation(operation.name, operation.size_bytes * count, operation.flops * count, operation.fp8)
