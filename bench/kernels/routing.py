"""Routing of DeepSeek-R1: the gate over 256 experts, the copies for a rank's 32 experts, and the experts' sum."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.kernels.deepseek_r1 import EXPERTS, HIDDEN, ROUTING, SHARED
from bench.kernels.inputs import random_bfloat16, random_rows
from bench.kernels.moe import EXPERTS_PER_TOKEN, LOCAL_EXPERTS, TOKENS, random_choice, random_expansion
from bench.kernels.timing import Case
from kernels.linear import multiply_in_shares
from kernels.moe_gate import moe_gate
from kernels.moe_gate.reference import moe_gate as plain_gate
from kernels.moe_permute import ExpertOutputs, RowsByExpert, combine, expand, expand_quantized
from kernels.moe_permute.reference import expand as plain_expand
from kernels.norm import add_rms_norm_quantized

Call = Callable[[], object]


def cases() -> Iterator[Case]:
    for tokens in TOKENS:
        values, copies = tokens * HIDDEN, tokens * EXPERTS_PER_TOKEN * HIDDEN
        weight_bytes = 2.0 * EXPERTS * HIDDEN
        made: dict[tuple[str, str], tuple[Callable[[int], Call], float]] = {
            ("gate's logits", "deepmesh"): (_logits, weight_bytes + 2 * values),
            ("gate", "deepmesh"): (_gate, weight_bytes + 2 * values),
            ("gate", "torch"): (_plain_gate, weight_bytes + 2 * values),
            ("copies for experts", "triton"): (_expand, 1.03 * (values + copies)),
            ("copies in bfloat16", "triton"): (partial(_expand_plain, expand), 2.0 * (values + copies)),
            ("copies in bfloat16", "torch"): (partial(_expand_plain, plain_expand), 2.0 * (values + copies)),
            ("experts' sum", "triton"): (_combine, 2.0 * (copies + values)),
            ("experts' sum and norm, quantized", "deepmesh"): (_norm, 2.0 * copies + 5.0 * values),
        }
        for (name, provider), (make, size_bytes) in made.items():
            yield Case(f"{name} by {tokens}", provider, partial(make, tokens), size_bytes)


def _gate_inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = random_bfloat16(tokens, HIDDEN)
    weight = random_bfloat16(EXPERTS, HIDDEN) / HIDDEN**0.5
    return hidden, weight, torch.randn(EXPERTS, device="cuda") / 10


def _logits(tokens: int) -> Call:
    hidden, weight, _ = _gate_inputs(tokens)
    return lambda: multiply_in_shares(hidden, weight)


def _gate(tokens: int) -> Call:
    hidden, weight, bias = _gate_inputs(tokens)
    return lambda: moe_gate(multiply_in_shares(hidden, weight), bias, ROUTING)


def _plain_gate(tokens: int) -> Call:
    hidden, weight, bias = _gate_inputs(tokens)
    return lambda: plain_gate(torch.mm(hidden, weight.t(), out_dtype=torch.float32), bias, ROUTING)


def _expand(tokens: int) -> Call:
    x, experts = random_rows(tokens, HIDDEN), random_choice(tokens)
    return lambda: expand_quantized(x, experts, LOCAL_EXPERTS, SHARED)


def _expand_plain(by: Callable[[torch.Tensor, torch.Tensor, int], RowsByExpert], tokens: int) -> Call:
    x, experts = random_bfloat16(tokens, HIDDEN), random_choice(tokens)
    return lambda: by(x, experts, LOCAL_EXPERTS)


def _outputs(tokens: int) -> ExpertOutputs:
    layout = random_expansion(tokens, 128).layout
    rows = random_bfloat16(*layout.shape, HIDDEN)
    return ExpertOutputs(rows, layout.positions, torch.rand(tokens, EXPERTS_PER_TOKEN, device="cuda"))


def _combine(tokens: int) -> Call:
    outputs = _outputs(tokens)
    return lambda: combine(outputs)


def _norm(tokens: int) -> Call:
    outputs = _outputs(tokens)
    residual, weight = outputs.rows.new_ones(tokens, HIDDEN), outputs.rows.new_ones(HIDDEN)
    return lambda: add_rms_norm_quantized(outputs, residual, weight, 1e-6)
