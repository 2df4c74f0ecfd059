"""Kernels that start before the previous one has ended compute what they compute one after the other."""

import pytest
import torch

from kernels.act_quant import quantize, reference
from kernels.fp8_gemm import BlockScaled, block_scaled, fp8_gemm, make_workspace
from kernels.index_keys import make_queries, pool_shape, write_keys
from kernels.index_scores import index_scores
from kernels.kv_copy import BLOCK_TOKENS
from kernels.kv_write import norm_quantize_and_write
from kernels.mla_decode import Attended, mla_decode, plan_decode
from kernels.mla_projections import absorb_query, expand_values, expand_values_quantized
from kernels.mla_selected import mla_selected
from kernels.moe_gate import Routing, moe_gate
from kernels.moe_permute import ExpertOutputs
from kernels.norm import add_rms_norm, add_rms_norm_quantized
from kernels.swiglu import swiglu_quantize
from kernels.top_tokens import top_tokens
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper
from tests.support.latents import scattered_contexts
from tests.support.replays import Chain, Step, assert_replays_are_exact

pytest.importorskip("triton")

from kernels.dependent_launch import dependent_launch
from kernels.grouped_gemm import one_token as experts_of_one_token
from kernels.linear import few_rows as linear_few_rows
from kernels.mla_projections import few_rows as mla_few_rows
from kernels.norm import few_rows as norm_few_rows

HIDDEN, QUERY, LATENT, ROPE, HEADS_WIDTH, INNER = 1024, 384, 512, 64, 768, 256
NOPE, VALUE = 128, 128
INDEX_HEADS, INDEX_WIDTH, TOP_K = 64, 128, 256
# Contexts that are split, and some that are not.
CONTEXTS = (1, 64, 200, 3000, 257, 900, 65, 130)
REPLAYS = 200


def test_launches_are_plain_without_a_gpu() -> None:
    assert dependent_launch(torch.device("cpu")) == {"DEPENDENT": False}


@pytest.mark.gpu
def test_unaligned_tensors_get_a_kernel_of_their_own() -> None:
    numbers = torch.randn(3 * 512 + 1, device="cuda").bfloat16()
    for first in (0, 1, 0):
        x = numbers[first : first + 3 * 512].view(3, 512)
        found, expected = quantize(x), quantize(x.clone())
        assert relative_error(found.scales, reference.quantize(x).scales) < 1e-6
        assert torch.equal(found.scales, expected.scales)
        assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))


def random_weight(outputs: int, inputs: int) -> BlockScaled:
    values = torch.randn(outputs, inputs, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand(-(-outputs // 128), inputs // 128, device="cuda") / inputs**0.5
    return block_scaled(values, scales)


def make_chain(tokens: int, layers: int) -> Chain:
    """The kernels around attention in some layers, and a dense feed-forward: every kernel follows another of ours."""
    norms = torch.rand(layers, 2, HIDDEN, device="cuda").bfloat16()
    inner = torch.rand(QUERY, device="cuda").bfloat16(), torch.rand(LATENT, device="cuda").bfloat16()
    shapes = [(QUERY + LATENT + ROPE, HIDDEN), (HEADS_WIDTH, QUERY), (HIDDEN, HEADS_WIDTH)]
    shapes += [(2 * INNER, HIDDEN), (HIDDEN, INNER)]
    weights = [[random_weight(*shape) for shape in shapes] for _ in range(layers)]
    workspace = make_workspace(torch.device("cuda"))
    turns = torch.polar(torch.ones(tokens, ROPE // 2), torch.rand(tokens, ROPE // 2)).cuda()
    slots = torch.randperm(4 * BLOCK_TOKENS, device="cuda")[:tokens]
    pool = torch.zeros(layers, 4, BLOCK_TOKENS, LATENT + ROPE, dtype=torch.bfloat16, device="cuda")

    def chain(hidden: torch.Tensor, after_each: Step) -> torch.Tensor:
        delta, residual = hidden, torch.zeros_like(hidden)
        for layer, (projection, queries, output, gate_up, down) in enumerate(weights):
            first = add_rms_norm_quantized(delta, residual, norms[layer, 0], 1e-6)
            after_each()
            projected = fp8_gemm(first, projection, workspace)
            after_each()
            query = norm_quantize_and_write(projected, *inner, 1e-6, turns, slots, pool[layer])
            after_each()
            values = fp8_gemm(query, queries, workspace)
            after_each()
            quantized = quantize(values)
            after_each()
            delta = fp8_gemm(quantized, output, workspace)
            after_each()
            second = add_rms_norm_quantized(delta, residual, norms[layer, 1], 1e-6)
            after_each()
            inside = fp8_gemm(second, gate_up, workspace)
            after_each()
            gated = swiglu_quantize(inside)
            after_each()
            delta = fp8_gemm(gated, down, workspace)
            after_each()
        return torch.cat([delta.flatten(), residual.flatten(), pool.view(-1, LATENT + ROPE)[slots].flatten()])

    return chain


def make_attention(heads: int, pool_dtype: torch.dtype) -> Chain:
    """Attention of some layers and the products around it, by whichever kernels take them: queries in, values out."""
    contexts = scattered_contexts(CONTEXTS, LATENT + ROPE)
    pool, table, lengths = contexts.pool.to("cuda", pool_dtype), contexts.block_table.cuda(), contexts.lengths.cuda()
    turns = torch.polar(torch.ones(len(CONTEXTS), ROPE // 2), torch.rand(len(CONTEXTS), ROPE // 2)).cuda()
    weights = torch.randn(6, heads, NOPE + VALUE, LATENT, device="cuda").bfloat16() / LATENT**0.5

    def chain(queries: torch.Tensor, after_each: Step) -> torch.Tensor:
        plan = plan_decode(table, lengths)
        found = []
        for layer, weight in enumerate(weights):
            query = absorb_query(queries.roll(layer, 0), weight[:, :NOPE], turns)
            after_each()
            attended = Attended(mla_decode(query, pool, plan, value_width=LATENT, scale=0.1).joined())
            after_each()
            found.append(expand_values_quantized(attended, weight[:, NOPE:].transpose(1, 2)).values.view(torch.uint8))
            after_each()
        return torch.stack(found)

    return chain


def make_selection(heads: int, pool_dtype: torch.dtype) -> Chain:
    """Attention of some layers to selected tokens: index keys and queries, scores, the choice, and what attends."""
    contexts, rows = scattered_contexts(CONTEXTS, LATENT + ROPE), len(CONTEXTS)
    pool, table, lengths = contexts.pool.to("cuda", pool_dtype), contexts.block_table.cuda(), contexts.lengths.cuda()
    shape, stored = pool_shape(INDEX_WIDTH, torch.float8_e4m3fn)
    keys = torch.zeros(len(pool), *shape, dtype=stored, device="cuda")
    norm, turns = torch.ones(INDEX_WIDTH, device="cuda"), torch.polar(torch.ones(rows, 32), torch.rand(rows, 32)).cuda()
    bias, weights = torch.zeros_like(norm), torch.randn(6, 7, rows, INDEX_HEADS, device="cuda")
    absorb, seen = torch.randn(heads, NOPE, LATENT, device="cuda").bfloat16() / LATENT**0.5, lengths.clone()
    last = lengths.long() - 1
    slots = table.gather(1, last.unsqueeze(1) // BLOCK_TOKENS).squeeze(1) * BLOCK_TOKENS + last % BLOCK_TOKENS
    every = torch.arange(len(pool) * BLOCK_TOKENS, device="cuda")
    stored_keys = torch.randn(len(every), INDEX_WIDTH, device="cuda").bfloat16()
    write_keys(stored_keys, norm, bias, turns[:1].repeat(len(every), 1), every, keys, interleaved=False)

    def chain(queries: torch.Tensor, after_each: Step) -> torch.Tensor:
        plan, found = plan_decode(table, lengths), []
        asking, key = queries[:, :INDEX_HEADS, :INDEX_WIDTH].contiguous(), queries[:, -1, :INDEX_WIDTH].contiguous()
        after_each()
        for weight in weights:
            write_keys(key, norm, bias, turns, slots, keys, interleaved=False)
            after_each()
            index = make_queries(asking, weight, turns, keys, factor=0.1, interleaved=False)
            after_each()
            scores = index_scores(index, keys, plan)
            after_each()
            tokens = top_tokens(scores, seen, TOP_K)
            after_each()
            query = absorb_query(queries, absorb, turns)
            after_each()
            found.append(mla_selected(query, pool, plan, tokens, value_width=LATENT, scale=0.1))
            after_each()
        return torch.stack(found)

    return chain


def make_one_row() -> Chain:
    """Layers of one row in bfloat16, by the kernels for it: products, attention and experts."""
    contexts = scattered_contexts(CONTEXTS[-1:], LATENT + ROPE)
    pool, table, lengths = contexts.pool.cuda().bfloat16(), contexts.block_table.cuda(), contexts.lengths.cuda()
    width, experts, inner, layers = 2048, 64, 1408, 4
    routing = Routing(6, 1, 1, True, 2.5, 2)
    norms, bias = torch.rand(layers, width, device="cuda").bfloat16(), torch.zeros(experts, device="cuda")
    shapes = [(experts, width), (experts + 2, 2 * inner, width), (experts + 2, width, inner)]
    shapes += [(HEADS_WIDTH, width), (16 * (NOPE + ROPE), HEADS_WIDTH), (16, NOPE + VALUE, LATENT)]
    shapes += [(width, 16 * VALUE)]
    weights = [[torch.randn(shape, device="cuda").bfloat16() / shape[-1] ** 0.5 for shape in shapes] for _ in norms]
    turns = torch.polar(torch.ones(1, ROPE // 2), torch.rand(1, ROPE // 2)).cuda()

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_few_rows.multiply_groups(x.unsqueeze(1), weight.unsqueeze(0)).squeeze(1)

    def chain(hidden: torch.Tensor, after_each: Step) -> torch.Tensor:
        delta, residual, found, plan = hidden, torch.zeros_like(hidden), [], plan_decode(table, lengths)
        for norm, (gate, gate_up, down, first, queries, heads, output) in zip(norms, weights, strict=True):
            made = norm_few_rows.add_rms_norm_and_logits(delta, residual, norm, 1e-6, gate, quantizes=False)
            residual = made.residual
            after_each()
            factors, choices = moe_gate(made.logits, bias, routing)
            after_each()
            outputs, positions = experts_of_one_token.feed_forward(made.plain, choices, gate_up, down, 0, 2)
            after_each()
            normalized = add_rms_norm(ExpertOutputs(outputs, positions, factors), residual, norm, 1e-6)
            after_each()
            inside = multiply(normalized, first)
            after_each()
            query = multiply(inside, queries).view(1, 16, NOPE + ROPE)
            after_each()
            absorbed = mla_few_rows.absorb_query(query, heads[:, :NOPE], turns)
            after_each()
            attended = mla_decode(absorbed, pool, plan, value_width=LATENT, scale=0.1)
            after_each()
            values = expand_values(attended, heads[:, NOPE:].transpose(1, 2))
            after_each()
            delta = multiply(values.flatten(1), output)
            after_each()
            found += [outputs, delta, residual]
        return torch.cat([each.flatten() for each in found])

    return chain


@pytest.mark.gpu
@on_hopper
def test_a_captured_chain_of_one_row_is_exact() -> None:
    assert_replays_are_exact(make_one_row(), (1, 2048), REPLAYS)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 30, 64, 90, 150])
def test_a_captured_chain_computes_what_its_kernels_do(tokens: int) -> None:
    assert_replays_are_exact(make_chain(tokens, layers=6), (tokens, HIDDEN), REPLAYS)


@pytest.mark.gpu
@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("heads", [4, 16, 128])
def test_captured_attention_always_computes_what_its_kernels_compute_in_turn(
    heads: int, pool_dtype: torch.dtype
) -> None:
    assert_replays_are_exact(make_attention(heads, pool_dtype), (len(CONTEXTS), heads, NOPE + ROPE), REPLAYS)


@pytest.mark.gpu
@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "e4m3"])
def test_captured_selections_equal_those_of_their_kernels_in_turn(pool_dtype: torch.dtype) -> None:
    assert_replays_are_exact(make_selection(128, pool_dtype), (len(CONTEXTS), 128, NOPE + ROPE), REPLAYS)
