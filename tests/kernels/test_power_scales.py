"""Scales of activations that are powers of two (`scale_fmt: ue8m0`), wherever activations are quantized."""

from collections.abc import Callable

import pytest
import torch

from kernels.act_quant import Quantized, dequantize, empty_quantized, quantize
from kernels.act_quant import triton as triton_act_quant
from kernels.kv_write import norm_quantize_and_write
from kernels.kv_write import triton as triton_kv_write
from kernels.mla_decode import Attended
from kernels.mla_prefill import attend_and_quantize, plan_prefill
from kernels.mla_projections import expand_values_quantized
from kernels.norm import add_rms_norm_in_both_forms, add_rms_norm_quantized
from kernels.norm import triton as triton_norm
from kernels.norm.few_rows import add_rms_norm_and_logits
from kernels.sparse_prefill import Selection, sparse_prefill_and_quantize
from kernels.swiglu import swiglu_quantize
from kernels.swiglu import triton as triton_swiglu
from tests.support.hopper import on_hopper
from tests.support.power_scales import assert_rounded_up

# What quantizes random values on a device: called again, it quantizes the same ones.
Make = Callable[[torch.device], Callable[[bool], Quantized]]
TOKENS, HEADS, VALUE, LATENT, ROPE = 9, 4, 128, 512, 64


def random(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device).bfloat16()


def spread_rows(device: torch.device, rows: int, width: int) -> torch.Tensor:
    """Groups of many magnitudes."""
    return (random(device, rows, width) * torch.logspace(-6, 6, width, device=device)).bfloat16()


def rows(device: torch.device) -> Callable[[bool], Quantized]:
    x = spread_rows(device, 5, 1152)
    return lambda powers: quantize(x, powers=powers)


def norms(device: torch.device) -> Callable[[bool], Quantized]:
    delta, residual, weight = (spread_rows(device, TOKENS, 1024), random(device, TOKENS, 1024), random(device, 1024))
    return lambda powers: add_rms_norm_quantized(delta, residual.clone(), weight, 1e-6, powers=powers)


def norms_in_both_forms(device: torch.device) -> Callable[[bool], Quantized]:
    delta, residual, weight = (random(device, TOKENS, 384), random(device, TOKENS, 384), random(device, 384))
    return lambda powers: add_rms_norm_in_both_forms(delta, residual.clone(), weight, 1e-6, powers=powers)[1]


def gated(device: torch.device) -> Callable[[bool], Quantized]:
    gate_up = spread_rows(device, 7, 2304)
    return lambda powers: swiglu_quantize(gate_up, powers=powers)


def queries(device: torch.device) -> Callable[[bool], Quantized]:
    projected, weights = random(device, TOKENS, 384 + 576), (random(device, 384), random(device, 512))
    turns = torch.randn(TOKENS, 32, dtype=torch.complex64, device=device)
    slots, pool = torch.arange(TOKENS, device=device), random(device, 2, 64, 576)
    return lambda powers: norm_quantize_and_write(projected.clone(), *weights, 1e-6, turns, slots, pool, powers=powers)


def expanded_values(device: torch.device) -> Callable[[bool], Quantized]:
    attended = Attended(random(device, TOKENS, HEADS, LATENT))
    weight = random(device, HEADS, 2 * VALUE, LATENT)[:, VALUE:].transpose(1, 2)
    return lambda powers: expand_values_quantized(attended, weight, powers=powers)


def attention(device: torch.device, *, in_e4m3: bool = False) -> Callable[[bool], Quantized]:
    inputs, plan = attention_inputs(device), plan_prefill([TOKENS], [TOKENS], device, quantized=in_e4m3)

    def attend(powers: bool) -> Quantized:
        out = empty_quantized(TOKENS, HEADS * VALUE, device=device, powers=powers)
        attend_and_quantize(*inputs, plan, out.rows(0, TOKENS), scale=0.1)
        return out

    return attend


def attention_in_e4m3(device: torch.device) -> Callable[[bool], Quantized]:
    return attention(device, in_e4m3=True)


def sparse_attention(device: torch.device) -> Callable[[bool], Quantized]:
    inputs = attention_inputs(device)
    # All of the only block of keys.
    selection = Selection(*(torch.ones(HEADS, 1, dtype=torch.bool, device=device) for _ in range(2)))

    def attend(powers: bool) -> Quantized:
        out = empty_quantized(TOKENS, HEADS * VALUE, device=device, powers=powers)
        sparse_prefill_and_quantize(*inputs, selection, out.rows(0, TOKENS), first_query=0, scale=0.1)
        return out

    return attend


def attention_inputs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    own, value = random(device, TOKENS, HEADS, 2 * VALUE).split(VALUE, dim=2)
    return random(device, TOKENS, HEADS, VALUE + ROPE), own, random(device, TOKENS, ROPE), value


by_function = pytest.mark.parametrize(
    "make",
    [rows, norms, norms_in_both_forms, gated, queries, expanded_values, attention, attention_in_e4m3, sparse_attention],
    ids=lambda make: make.__name__,
)


@by_function
def test_scales_are_rounded_up_to_powers(make: Make) -> None:
    assert_rounded_up(make(torch.device("cpu")))


@pytest.mark.gpu
@on_hopper
@by_function
def test_hoppers_kernels_round_scales_up(make: Make) -> None:
    assert_rounded_up(make(torch.device("cuda")))


def of_triton(device: torch.device) -> dict[str, Callable[[bool], Quantized]]:
    """Its kernels, in the interpreter if there is no GPU."""
    x, ones = spread_rows(device, 5, 1152), torch.ones(1152, device=device).bfloat16()
    gate, slots = random(device, 16, 1152), torch.arange(5, device=device)
    turns, pool = torch.randn(5, 32, dtype=torch.complex64, device=device), random(device, 1, 64, 576)

    def quantized(powers: bool) -> Quantized:
        out = empty_quantized(*x.shape, device=device, powers=powers)
        triton_act_quant.quantize_into(x, out.rows(0, len(x)))
        return out

    def normalized(powers: bool) -> Quantized:
        out = empty_quantized(*x.shape, device=device, powers=powers)
        triton_norm.add_rms_norm(x, torch.zeros_like(x), ones, 1e-6, None, out)
        return out

    def normalized_with_logits(powers: bool) -> Quantized:
        made = add_rms_norm_and_logits(x, torch.zeros_like(x), ones, 1e-6, gate, quantizes=True, powers=powers)
        assert made.quantized is not None
        return made.quantized

    def queries(powers: bool) -> Quantized:
        projected = torch.cat([x[:, :384], x[:, :576]], dim=1)
        return triton_kv_write.norm_quantize_and_write(
            projected, ones[:384], ones[:512], 1e-6, turns, slots, pool, 1.0, powers
        )

    def gated(powers: bool) -> Quantized:
        return triton_swiglu.swiglu_quantize(x[:, :1024].contiguous(), None, powers)

    return {each.__name__: each for each in (quantized, normalized, normalized_with_logits, queries, gated)}


@pytest.mark.parametrize("name", ["quantized", "normalized", "normalized_with_logits", "queries", "gated"])
def test_tritons_kernels_round_scales_up(name: str, device: torch.device) -> None:
    assert_rounded_up(of_triton(device)[name])


@pytest.mark.parametrize("largest", [448.0, 3.5, 7.0, 448 * 2**-20])
def test_a_scale_that_is_a_power_stays(largest: float) -> None:
    x = torch.zeros(1, 128)
    x[0, 5] = -largest
    found = quantize(x, powers=True)
    assert found.scales.item() == largest / 448 and dequantize(found)[0, 5] == -largest


def test_zeros_stay_zeros() -> None:
    found = quantize(torch.zeros(3, 256), powers=True)
    assert not dequantize(found).any() and found.scales.isfinite().all()
