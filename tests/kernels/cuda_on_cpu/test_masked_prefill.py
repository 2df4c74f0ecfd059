"""Attention of a prompt to chosen keys on the CPU, with the source that makes their bits."""

from dataclasses import replace

import pytest
import torch

from kernels.act_quant import dequantize, empty_quantized
from kernels.mla_prefill import PrefillPlan, empty_mask, mla_prefill, plan_prefill, write_mask
from kernels.mla_prefill.mask import seen_keys
from kernels.mla_prefill.tiles import cut_tiles
from tests.support.chosen_keys import choose_keys
from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.errors import relative_error

HEADS, ROPE, SCALE = 3, 64, 0.1
DEEPSEEK, GLM = (128, 128), (192, 256)


def plan_of(queries: int, keys: int) -> PrefillPlan:
    """With what a Hopper GPU's kernels read."""
    tiles = torch.tensor(cut_tiles([queries], [keys]), dtype=torch.int32)
    return replace(plan_prefill([queries], [keys], torch.device("cpu")), tiles=tiles, taken=torch.zeros(1).int())


@pytest.mark.parametrize("count", [1, 40, 300])
def test_words_have_the_bits_of_chosen_keys(count: int, on_cpu: CudaOnCpu) -> None:
    tokens, mask = choose_keys(70, 290, count), empty_mask(130, 290, torch.device("cpu")).fill_(-1)
    words = on_cpu.module("mla_prefill.mask_words")
    # Two blocks at a time.
    on_cpu.make_mistake(words.SOURCE, "HELD = 1024", "HELD = 8")
    words.write_mask(tokens, mask[:, 20:90])
    expected = torch.full_like(mask, -1)
    write_mask(tokens, expected[:, 20:90])
    assert torch.equal(mask, expected)


@pytest.mark.parametrize(
    ("queries", "keys", "count", "widths"),
    [
        (1, 1, 1, DEEPSEEK),
        (130, 400, 150, DEEPSEEK),
        (129, 129, 200, DEEPSEEK),
        (130, 400, None, DEEPSEEK),
        (130, 330, 90, GLM),
    ],
)
def test_queries_attend_to_their_chosen_keys(
    queries: int, keys: int, count: int | None, widths: tuple[int, int], on_cpu: CudaOnCpu
) -> None:
    own, value = widths
    bf16, plan = on_cpu.module("mla_prefill.bf16"), plan_of(queries, keys)
    query = torch.randn(queries, HEADS, own + ROPE).bfloat16()
    parts = torch.randn(keys, HEADS, own + value).bfloat16().split([own, value], dim=2)
    inputs = query, parts[0], torch.randn(keys, ROPE).bfloat16(), parts[1]
    mask = None
    if count is not None:
        mask = empty_mask(queries, keys, torch.device("cpu")).random_()
        write_mask(choose_keys(queries, keys, count), mask[:, :queries])
        assert seen_keys(mask, queries, keys).sum(1).max() <= count
    expected, found = query.new_empty(queries, HEADS, value).float(), query.new_empty(queries, HEADS, value)
    plain = query.float(), parts[0].float(), inputs[2].float(), parts[1].float()
    mla_prefill(*plain, plan, expected, scale=SCALE, mask=mask)
    bf16.mla_prefill(*inputs, plan, found, SCALE, mask)
    assert relative_error(found, expected) < 0.01 and not plan.taken
    quantized = empty_quantized(queries, HEADS * value, device=query.device)
    bf16.attend_and_quantize(*inputs, plan, quantized.rows(0, queries), SCALE, mask)
    assert relative_error(dequantize(quantized).view_as(expected), expected) < 0.04
