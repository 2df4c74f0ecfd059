"""What models of the family compute otherwise than DeepSeek-R1: experts in bfloat16, and wide heads in prompts."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import torch
from torch.nn import functional

from bench.kernels.inputs import random_bfloat16
from bench.kernels.timing import Case
from kernels.grouped_gemm import few_rows, grouped_gemm, grouped_swiglu, reference
from kernels.mla_prefill import bf16, plan_prefill, triton
from kernels.swiglu import swiglu

# By model: experts with the shared ones, of which a token chooses this many; the hidden size; an expert's width.
EXPERTS = {"Moonlight": (66, 8, 2048, 1408), "GLM-4.7-Flash": (65, 5, 2048, 1536)}
TOKENS = (1, 16, 64, 128, 256, 512, 2048, 8192)
# The most of them for which the kernel of few rows is timed in all tilings.
FEW_TOKENS = 256
# By model: heads, their own and shared channels of keys, and values.
HEADS = {"GLM-4.7-Flash": (20, 192, 64, 256), "GigaChat3": (32, 128, 64, 192)}
LENGTHS = ([4096], [8192], [32768], [3500] * 4)
# Other tiles than those that are chosen, by name.
TILINGS = {
    "32 outputs": few_rows.Tiling(16, 32, 128, 4, 4),
    "32 outputs, 256 inputs": few_rows.Tiling(16, 32, 256, 3, 4),
    "128 outputs": few_rows.Tiling(16, 128, 64, 4, 4),
    "64 outputs, 64 inputs": few_rows.Tiling(16, 64, 64, 6, 4),
    "32 rows": few_rows.Tiling(32, 64, 128, 4, 4),
    "32 rows, 128 outputs": few_rows.Tiling(32, 128, 64, 4, 8),
    "64 rows, 128 outputs": few_rows.Tiling(64, 128, 64, 4, 4),
}
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def cases() -> Iterator[Case]:
    for model in EXPERTS:
        for tokens in TOKENS:
            yield from chain(_experts(model, tokens, gated=True), _experts(model, tokens, gated=False))
    for model in HEADS:
        for lengths in LENGTHS:
            yield from _prompts(model, lengths)


def _experts(model: str, tokens: int, *, gated: bool) -> Iterator[Case]:
    experts, choices, hidden, width = EXPERTS[model]
    inputs, outputs, matrix = (hidden, width, 2 * width) if gated else (width, hidden, hidden)
    chosen = torch.rand(tokens, experts, device="cuda").argsort(dim=1)[:, :choices]
    ends = torch.bincount(chosen.flatten(), minlength=experts).cumsum(0).int()
    touched, rows = chosen.unique().numel(), tokens * choices

    def make(product: Product) -> Callable[[], object]:
        x, weights = random_bfloat16(rows, inputs), random_bfloat16(experts, matrix, inputs)
        return lambda: product(x, weights, ends)

    products: dict[str, Product] = {"deepmesh": grouped_swiglu if gated else grouped_gemm}
    products["few rows"] = partial(few_rows.grouped_gemm, gated=gated)
    if tokens <= FEW_TOKENS:
        products |= {name: partial(few_rows.grouped_gemm, gated=gated, tiling=each) for name, each in TILINGS.items()}
    products["torch"] = _gated_by_torch if gated else reference.grouped_gemm
    for provider, product in products.items():
        yield Case(
            f"{model}'s experts, {'gate and up' if gated else 'down'}, {tokens} tokens",
            provider,
            partial(make, product),
            2.0 * (touched * matrix * inputs + rows * (inputs + outputs)),
            2.0 * rows * matrix * inputs,
        )


def _gated_by_torch(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return swiglu(reference.grouped_gemm(x, weights, ends))


def _prompts(model: str, lengths: list[int]) -> Iterator[Case]:
    heads, own, rope, value = HEADS[model]
    tokens, scores = sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
    flops, size_bytes = 2.0 * scores * heads * (own + rope + value), 4.0 * tokens * heads * (own + rope + value)
    scale, device = (own + rope) ** -0.5, torch.device("cuda")

    def make(attend: Callable[..., object]) -> Callable[[], object]:
        plan, query = plan_prefill(lengths, lengths, device), random_bfloat16(tokens, heads, own + rope)
        keys, values = random_bfloat16(tokens, heads, own + value).split([own, value], dim=2)
        shared, out = random_bfloat16(tokens, 512 + rope)[:, 512:], random_bfloat16(tokens, heads, value)
        return lambda: attend(query, keys, shared, values, plan, out, scale)

    def make_peer() -> Callable[[], object]:
        query, key, values = (random_bfloat16(1, heads, tokens, width) for width in (own + rope, own + rope, value))
        return lambda: functional.scaled_dot_product_attention(query, key, values, is_causal=True, scale=scale)

    shape = f"{model}'s prompts, {len(lengths)} x {lengths[0]}"
    yield Case(shape, "deepmesh, CUDA", partial(make, bf16.mla_prefill), size_bytes, flops)
    yield Case(shape, "deepmesh, Triton", partial(make, triton.mla_prefill), size_bytes, flops)
    if len(lengths) == 1:
        yield Case(shape, "torch", make_peer, size_bytes, flops)
