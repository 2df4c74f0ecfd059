"""Kernels that start while the one before them ends give what they give one after another."""

from collections.abc import Callable

import pytest
import torch

from kernels.act_quant import quantize
from kernels.fp8_gemm import BlockScaled, block_scaled, fp8_gemm
from kernels.kv_copy import BLOCK_TOKENS
from kernels.kv_write import norm_quantize_and_write
from kernels.norm import add_rms_norm_quantized
from kernels.swiglu import swiglu_quantize

pytest.importorskip("triton")

from kernels.dependent_launch import dependent_launch

HIDDEN, QUERY, LATENT, ROPE, HEADS_WIDTH, INNER = 1024, 384, 512, 64, 768, 256
REPLAYS = 200
Step = Callable[[], object]
Chain = Callable[[torch.Tensor, Step], torch.Tensor]


def test_kernels_wait_for_the_launch_where_there_is_no_gpu() -> None:
    assert dependent_launch(torch.device("cpu")) == {"DEPENDENT": False}


def random_weight(outputs: int, inputs: int) -> BlockScaled:
    values = torch.randn(outputs, inputs, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand(-(-outputs // 128), inputs // 128, device="cuda") / inputs**0.5
    return block_scaled(values, scales)


def make_chain(tokens: int, layers: int) -> Chain:
    """What surrounds attention in some layers, and their dense feed-forward: every kernel follows another of ours."""
    norms = torch.rand(layers, 2, HIDDEN, device="cuda").bfloat16()
    inner = torch.rand(QUERY, device="cuda").bfloat16(), torch.rand(LATENT, device="cuda").bfloat16()
    shapes = [(QUERY + LATENT + ROPE, HIDDEN), (HEADS_WIDTH, QUERY), (HIDDEN, HEADS_WIDTH)]
    shapes += [(2 * INNER, HIDDEN), (HIDDEN, INNER)]
    weights = [[random_weight(*shape) for shape in shapes] for _ in range(layers)]
    turns = torch.polar(torch.ones(tokens, ROPE // 2), torch.rand(tokens, ROPE // 2)).cuda()
    slots = torch.randperm(4 * BLOCK_TOKENS, device="cuda")[:tokens]
    pool = torch.zeros(layers, 4, BLOCK_TOKENS, LATENT + ROPE, dtype=torch.bfloat16, device="cuda")

    def chain(hidden: torch.Tensor, after_each: Step) -> torch.Tensor:
        delta, residual = hidden, torch.zeros_like(hidden)
        for layer, (projection, queries, output, gate_up, down) in enumerate(weights):
            _, first = add_rms_norm_quantized(delta, residual, norms[layer, 0], 1e-6)
            after_each()
            projected = fp8_gemm(first, projection)
            after_each()
            query = norm_quantize_and_write(projected, *inner, 1e-6, turns, slots, pool[layer])
            after_each()
            values = fp8_gemm(query, queries)
            after_each()
            quantized = quantize(values)
            after_each()
            delta = fp8_gemm(quantized, output)
            after_each()
            _, second = add_rms_norm_quantized(delta, residual, norms[layer, 1], 1e-6)
            after_each()
            inside = fp8_gemm(second, gate_up)
            after_each()
            gated = swiglu_quantize(inside)
            after_each()
            delta = fp8_gemm(gated, down)
            after_each()
        return torch.cat([delta.flatten(), residual.flatten(), pool.view(-1, LATENT + ROPE)[slots].flatten()])

    return chain


# Inputs change from replay to replay, so that what was left by the one before shows; poisoning new tensors would put a
# kernel that waits between any two.
@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 30, 64, 90, 150])
def test_a_captured_chain_gives_what_its_kernels_give_one_after_another_every_time(tokens: int) -> None:
    chain = make_chain(tokens, layers=6)
    given = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
    inputs = [torch.randn_like(given) for _ in range(4)]
    expected = [chain(each, torch.cuda.synchronize) for each in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(given, lambda: None)
    for replay in range(REPLAYS):
        given.copy_(inputs[replay % 4])
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, expected[replay % 4])
