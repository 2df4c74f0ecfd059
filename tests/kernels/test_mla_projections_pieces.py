"""Values of what attention left in pieces, against the pieces joined first, on Hopper."""

import pytest
import torch

from bench.kernels.inputs import random_bfloat16
from kernels.act_quant import dequantize
from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode import Attended, mla_decode, plan_decode
from kernels.mla_projections import expand_values, expand_values_quantized, pieces
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

LATENT, WIDTH, NOPE, VALUE = 512, 576, 128, 128
E4M3 = torch.float8_e4m3fn
LENGTHS = {
    "one": [3500],
    "one block": [5],
    "two": [3500, 700],
    "one long": [90000],
    "a whole one and one in pieces": [64, 9000],
}


class Step:
    def __init__(
        self, lengths: list[int], query_tokens: int, heads: int, dtype: torch.dtype, value: int = VALUE
    ) -> None:
        blocks = [-(-(length + query_tokens) // BLOCK_TOKENS) for length in lengths]
        self.pool = random_bfloat16(sum(blocks), BLOCK_TOKENS, WIDTH).to(dtype)
        table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32, device="cuda")
        order = torch.randperm(sum(blocks), device="cuda").int()
        for row, (own, count) in enumerate(zip(order.split(blocks), blocks, strict=True)):
            table[row, :count] = own
        totals = torch.tensor([length + query_tokens - 1 for length in lengths], dtype=torch.int32, device="cuda")
        self.plan = plan_decode(table, totals, query_tokens)
        self.query = random_bfloat16(len(lengths) * query_tokens, heads, WIDTH)
        self.weight = random_bfloat16(heads, NOPE + value, LATENT)[:, NOPE:].transpose(1, 2)

    def attended(self) -> Attended:
        return mla_decode(self.query, self.pool, self.plan, value_width=LATENT, scale=0.05)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("query_tokens", [1, 2])
@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_pieces_are_joined_before_values_or_on_the_way(
    lengths: list[int], query_tokens: int, heads: int, dtype: torch.dtype
) -> None:
    step = Step(lengths, query_tokens, heads, dtype)
    expected = expand_values_quantized(Attended(step.attended().joined()), step.weight)
    found = expand_values_quantized(step.attended(), step.weight)
    assert torch.allclose(found.scales, expected.scales, rtol=2e-2)
    assert relative_error(dequantize(found), dequantize(expected)) < 0.03


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize(("heads", "value"), [(16, VALUE), (20, 2 * VALUE)])
def test_pieces_become_values_in_bfloat16_too(lengths: list[int], heads: int, value: int) -> None:
    step = Step(lengths, 1, heads, torch.bfloat16, value)
    expected = expand_values(Attended(step.attended().joined()), step.weight)
    assert relative_error(pieces.expand_pieces(step.attended(), step.weight), expected) < 0.01


@pytest.mark.gpu
@on_hopper
def test_captured_pieces_give_the_same_values_at_each_replay() -> None:
    step = Step([3500, 100], 1, 32, E4M3)
    first = dequantize(expand_values_quantized(step.attended(), step.weight))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.plan.schedule.metadata = None
        found = expand_values_quantized(step.attended(), step.weight)
    for _ in range(20):
        found.values.view(torch.uint8).zero_()
        graph.replay()
        assert torch.equal(dequantize(found), first)
