"""Attention of a few tokens, and values of what it leaves in pieces, on the CPU."""

import pytest
import torch

from kernels.act_quant import Quantized, dequantize, empty_quantized
from kernels.mla_decode import plan_decode, reference
from kernels.mla_projections.reference import expand_values
from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.errors import relative_error
from tests.support.power_scales import assert_rounded_up
from tests.support.written_latents import assert_written_and_absorbed

HEADS, LATENT, WIDTH, SCALE = 4, 512, 576, 0.05


# A context in pieces, one that is whole, and both.
@pytest.mark.parametrize(("lengths", "width"), [([500], 128), ([70], 128), ([64, 500], 256)], ids=str)
@pytest.mark.parametrize("few", [0, 4])
def test_pieces_become_values_quantized_or_not(
    few: int, lengths: list[int], width: int, on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.few_rows.MOST_ROWS", few)
    attention, pieces = on_cpu.module("mla_decode.bf16"), on_cpu.module("mla_projections.pieces")
    pool, query = torch.randn(20, 64, WIDTH).bfloat16(), torch.randn(len(lengths), HEADS, WIDTH).bfloat16()
    plan = plan_decode(torch.randperm(20).int().view(2, 10)[: len(lengths)], torch.tensor(lengths).int())
    weight = torch.randn(HEADS, 3 * width, LATENT).bfloat16()[:, -width:].transpose(1, 2) / LATENT**0.5
    latents = reference.mla_decode(query.float(), pool.float(), plan, LATENT, SCALE, 1.0)
    expected = expand_values(latents, weight.float())
    assert relative_error(pieces.expand_pieces(attention.attend(query, pool, plan, SCALE), weight), expected) < 0.01
    plan.schedule.metadata = None
    quantized = empty_quantized(len(lengths), HEADS * width, device=query.device)
    pieces.expand_pieces_into(attention.attend(query, pool, plan, SCALE), weight, quantized.rows(0, len(lengths)))
    assert relative_error(dequantize(quantized).view_as(expected), expected) < 0.04


def test_scales_of_values_are_rounded_up_to_powers(on_cpu: CudaOnCpu) -> None:
    attention, pieces = on_cpu.module("mla_decode.bf16"), on_cpu.module("mla_projections.pieces")
    pool, query = torch.randn(10, 64, WIDTH).bfloat16(), torch.randn(1, HEADS, WIDTH).bfloat16()
    plan = plan_decode(torch.randperm(10).int().view(1, 10), torch.tensor([500]).int())
    weight = torch.randn(HEADS, 256, LATENT).bfloat16()[:, 128:].transpose(1, 2)
    attended = attention.attend(query, pool, plan, SCALE)

    def expanded(powers: bool) -> Quantized:
        out = empty_quantized(1, HEADS * 128, device=query.device, powers=powers)
        pieces.expand_pieces_into(attended, weight, out.rows(0, 1))
        return out

    assert_rounded_up(expanded)


# Tokens of one tile with narrow CTAs, and of two tiles.
@pytest.mark.parametrize(("tokens", "pool_dtype"), [(5, torch.bfloat16), (97, torch.float8_e4m3fn)], ids=str)
def test_latents_are_written_where_queries_are_absorbed(
    tokens: int, pool_dtype: torch.dtype, on_cpu: CudaOnCpu
) -> None:
    module, widths = on_cpu.module("mla_projections.few_tokens"), (128, WIDTH - LATENT, LATENT)
    assert_written_and_absorbed(module, tokens, 2, widths, pool_dtype, torch.device("cpu"))
