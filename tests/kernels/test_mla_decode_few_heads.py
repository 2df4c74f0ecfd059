"""Attention of one token with few heads on Hopper, against its definition and as a kernel of a captured chain."""

from collections.abc import Callable

import pytest
import torch

from bench.kernels.inputs import random_bfloat16
from kernels.kv_write import norm_and_write
from kernels.mla_decode import plan_decode, reference
from kernels.mla_projections import absorb_query, pieces, write_and_absorb
from kernels.mla_projections import few_rows as projections
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper
from tests.support.latents import scattered_contexts

few_heads = pytest.importorskip("kernels.mla_decode.few_heads")
few_heads_parts = pytest.importorskip("kernels.mla_decode.few_heads_parts")

LATENT, WIDTH, NOPE, ROPE, SCALE = 512, 576, 128, 64, 0.05
REPLAYS = 100

pytestmark = [pytest.mark.gpu, on_hopper, pytest.mark.usefixtures("poisoned")]


def assert_replays_alike(step: Callable[[bool], torch.Tensor], lengths: torch.Tensor) -> None:
    """Compares a captured step with one whose kernels end one after another. Lengths grow between replays."""
    step(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(False)
    for _ in range(REPLAYS):
        found.zero_()
        graph.replay()
        seen = found.clone()
        assert torch.equal(seen, step(True))
        lengths += 1


@pytest.mark.parametrize("length", [1, 64, 65, 3500, 4097, 90000])
@pytest.mark.parametrize("heads", [3, 16, 20, 32])
def test_one_token_attends_to_its_context(length: int, heads: int) -> None:
    stored = scattered_contexts([length], WIDTH)
    pool, query = stored.pool.cuda().bfloat16(), random_bfloat16(1, heads, WIDTH)
    plan = plan_decode(stored.block_table.cuda(), stored.lengths.cuda())
    found = few_heads.attend(query, pool, plan, SCALE).joined()
    expected = reference.mla_decode(query.float(), pool.float(), plan, LATENT, SCALE, 1.0)
    assert relative_error(found, expected) < 0.01


@pytest.mark.parametrize("lengths", [[3500] * 16, [1, 64, 65, 3500, 20000], [700] * 200, [5] * 7, [90000]], ids=len)
@pytest.mark.parametrize("heads", [3, 16, 20])
def test_each_request_attends_to_its_context(lengths: list[int], heads: int) -> None:
    stored = scattered_contexts(lengths, WIDTH)
    pool, query = stored.pool.cuda().bfloat16(), random_bfloat16(len(lengths), heads, WIDTH)
    plan = plan_decode(stored.block_table.cuda(), stored.lengths.cuda())
    assert few_heads_parts.takes(query, pool, plan, LATENT)
    expected = reference.mla_decode(query.float(), pool.float(), plan, LATENT, SCALE, 1.0)
    for _ in range(2):
        found = few_heads_parts.attend(query, pool, plan, SCALE).joined()
        assert relative_error(found, expected) < 0.01


def test_its_captured_pieces_see_the_latest_latent() -> None:
    """Each layer writes a latent, attends at once, and expands."""
    heads, value = 16, 128
    table = torch.randperm(80).int().view(1, 80).cuda()
    pool, lengths = random_bfloat16(80, 64, WIDTH), torch.tensor([3000], device="cuda", dtype=torch.int32)
    projected = random_bfloat16(6, 1, heads * (NOPE + ROPE) + WIDTH)
    weight, norm = random_bfloat16(heads, NOPE + value, LATENT), torch.ones(LATENT, device="cuda").bfloat16()
    turns = torch.ones(1, ROPE // 2, dtype=torch.complex64, device="cuda")

    def step(after_each: bool) -> torch.Tensor:
        last, plan, found = lengths.long() - 1, plan_decode(table, lengths), []
        slots = table[0, last // 64] * 64 + last % 64
        for own in projected:
            absorb = weight[:, :NOPE].contiguous()
            queries, latents = own[:, :-WIDTH].view(1, heads, -1), own[:, -WIDTH:]
            query = projections.write_and_absorb(queries, latents, absorb, norm, 1e-6, turns, slots, pool, 1.0)
            if after_each:
                torch.cuda.synchronize()
            attended = few_heads.attend(query, pool, plan, SCALE)
            if after_each:
                torch.cuda.synchronize()
            found.append(pieces.expand_pieces(attended, weight[:, NOPE:].transpose(1, 2)))
        return torch.stack(found)

    assert_replays_alike(step, lengths)


# With latents that the kernel before attention writes, and with a kernel between.
@pytest.mark.parametrize("at_once", [False, True])
def test_rows_of_one_prompt_see_what_their_layer_has_written(at_once: bool) -> None:
    """The last tokens of a prompt are rows of their own, and each attends to those before it. Layers share a pool: a
    latent that is read too early is another layer's.
    """
    rows, heads = 16, 16
    table = torch.randperm(80).int().view(1, 80).repeat(rows, 1).cuda()
    lengths = torch.arange(3000, 3000 + rows, device="cuda", dtype=torch.int32)
    pool, projected = random_bfloat16(80, 64, WIDTH), random_bfloat16(6, rows, heads * (NOPE + ROPE) + WIDTH)
    weight, norm = random_bfloat16(heads, NOPE, LATENT), torch.ones(LATENT, device="cuda").bfloat16()
    turns = torch.ones(rows, ROPE // 2, dtype=torch.complex64, device="cuda")

    def step(after_each: bool) -> torch.Tensor:
        last, plan, found = lengths.long() - 1, plan_decode(table, lengths), []
        slots = table[0, last // 64] * 64 + last % 64
        for own in projected:
            if at_once:
                queries, latents = own[:, :-WIDTH].view(rows, heads, -1), own[:, -WIDTH:]
                query = write_and_absorb(queries, latents, weight, norm, 1e-6, turns, slots, pool)
                assert query is not None
            else:
                queries = norm_and_write(own.clone(), None, norm, 1e-6, turns, slots, pool)
                query = absorb_query(queries.view(rows, heads, -1), weight, turns)
            if after_each:
                torch.cuda.synchronize()
            found.append(few_heads_parts.attend(query, pool, plan, SCALE).joined())
        return torch.stack(found)

    assert_replays_alike(step, lengths)
