"""The floor of a step: what its operations take where each moves its bytes, or computes its FLOPs, at the ceilings."""

from collections.abc import Iterator
from dataclasses import dataclass

from bench.rank.ceilings import Ceilings
from engine.model.config import ModelConfig
from engine.model.quantization import Stored

BF16, FP8 = 2, 1
# Two weights a byte, and a bfloat16 scale for 128.
INT4 = 1 / 2 + 2 / 128


@dataclass(frozen=True)
class Operation:
    """The operation in all layers together.

    Counted are the bytes of weights and KV, each read once, and of those experts only that rows use; activations are
    not, since a step's fit the second-level cache.
    """

    name: str
    size_bytes: float
    flops: float
    # Whether the product may have FP8 operands.
    fp8: bool

    def seconds(self, ceilings: Ceilings) -> float:
        return ceilings.seconds(self.size_bytes, self.flops, fp8=self.fp8)


def decode_operations(config: ModelConfig, rows: int, context: int, kv_item_bytes: int) -> list[Operation]:
    """One token for each of `rows` requests with contexts of `context` tokens."""
    layers = config.num_hidden_layers
    dense = sum(config.is_dense(layer) for layer in range(layers))
    return [
        *(_times(operation, layers) for operation in _attention(config, rows, context, kv_item_bytes)),
        *(_times(operation, dense) for operation in _feed_forward("dense", config, rows, config.intermediate_size)),
        *(_times(operation, layers - dense) for operation in _experts(config, rows)),
        _product("head", rows, config.hidden_size, config.vocab_size, fp8=False),
    ]


def decode_floor(operations: list[Operation], ceilings: Ceilings) -> float:
    """Seconds."""
    return sum(operation.seconds(ceilings) for operation in operations)


def _attention(config: ModelConfig, rows: int, context: int, kv_item_bytes: int) -> Iterator[Operation]:
    heads, hidden, latent = config.num_attention_heads, config.hidden_size, config.kv_lora_rank
    inner = config.q_lora_rank or 0
    yield _product("attention input", rows, hidden, inner + config.latent_dim, fp8=True)
    yield _product("attention queries", rows, inner, heads * config.qk_head_dim, fp8=True)
    for name, width in (("absorb", config.qk_nope_head_dim), ("expand", config.v_head_dim)):
        one = _product(f"attention {name}", rows, width, latent, fp8=False)
        yield _times(one, heads)
    kv_bytes = rows * context * config.latent_dim * kv_item_bytes
    flops = 2 * rows * heads * context * (config.latent_dim + latent)
    yield Operation("attention", kv_bytes, flops, fp8=kv_item_bytes == FP8)
    yield _product("attention output", rows, heads * config.v_head_dim, hidden, fp8=True)


def _feed_forward(name: str, config: ModelConfig, rows: int, width: int) -> Iterator[Operation]:
    yield _product(f"{name} gate and up", rows, config.hidden_size, 2 * width, fp8=True)
    yield _product(f"{name} down", rows, width, config.hidden_size, fp8=True)


def _experts(config: ModelConfig, rows: int) -> Iterator[Operation]:
    yield _product("gate", rows, config.hidden_size, config.n_routed_experts, fp8=False)
    yield from _feed_forward("shared", config, rows, config.moe_intermediate_size * config.n_shared_experts)
    chosen = config.num_experts_per_tok
    # The number of experts that an even choice touches.
    touched = config.n_routed_experts * (1 - (1 - chosen / config.n_routed_experts) ** rows)
    item_bytes = INT4 if config.quantization.experts is Stored.INT4 else FP8
    pairs, hidden, width = rows * chosen, config.hidden_size, config.moe_intermediate_size
    for name, inputs, outputs in (("gate and up", hidden, 2 * width), ("down", width, hidden)):
        yield Operation(
            f"experts {name}", touched * inputs * outputs * item_bytes, 2 * pairs * inputs * outputs, fp8=True
        )


def _product(name: str, rows: int, inputs: int, outputs: int, *, fp8: bool) -> Operation:
    return Operation(name, inputs * outputs * (FP8 if fp8 else BF16), 2 * rows * inputs * outputs, fp8)


def _times(operation: Operation, count: int) -> Operation:
    return Operation(operation.name, operation.size_bytes * count, operation.flops * count, operation.fp8)
