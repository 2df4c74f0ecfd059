"""Attention of one token with few heads on the CPU, by the sources that compute it and join its pieces."""

import pytest
import torch

from kernels.mla_decode import plan_decode, reference
from kernels.mla_projections.reference import expand_values
from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.errors import relative_error
from tests.support.latents import scattered_contexts

LATENT, WIDTH, VALUE, SCALE = 512, 576, 128, 0.05
LAUNCHES = 3


# One block, whole blocks, and more blocks than there are CTAs.
@pytest.mark.parametrize(("length", "heads"), [(1, 16), (640, 20), (4200, 5)], ids=str)
def test_one_token_attends_to_its_context(length: int, heads: int, on_cpu: CudaOnCpu) -> None:
    stored = scattered_contexts([length], WIDTH)
    query, plan = torch.randn(1, heads, WIDTH).bfloat16(), plan_decode(stored.block_table, stored.lengths, 1)
    expected = reference.mla_decode(query.float(), stored.pool.float(), plan, LATENT, SCALE, 1.0)
    attended = on_cpu.module("mla_decode.few_heads").attend(query, stored.pool.bfloat16(), plan, SCALE)
    weight = torch.randn(heads, 2 * VALUE, LATENT).bfloat16()[:, VALUE:].transpose(1, 2)
    found = on_cpu.module("mla_projections.pieces").expand_pieces(attended, weight)
    assert relative_error(found, expand_values(expected, weight.float())) < 0.01
    assert relative_error(attended.joined(), expected) < 0.01


# Requests that several parts share, several requests of a part, and one token of context.
@pytest.mark.parametrize(("lengths", "heads"), [([1, 64, 65, 700, 3], 16), ([900, 130, 640, 1], 20)], ids=str)
def test_each_request_attends_to_its_context(lengths: list[int], heads: int, on_cpu: CudaOnCpu) -> None:
    stored = scattered_contexts(lengths, WIDTH)
    query, plan = torch.randn(len(lengths), heads, WIDTH).bfloat16(), plan_decode(stored.block_table, stored.lengths, 1)
    expected = reference.mla_decode(query.float(), stored.pool.float(), plan, LATENT, SCALE, 1.0)
    found = on_cpu.module("mla_decode.few_heads_parts").attend(query, stored.pool.bfloat16(), plan, SCALE).joined()
    assert relative_error(found, expected) < 0.01


@pytest.mark.parametrize("name", ["few_heads", "few_heads_parts"])
def test_nothing_is_read_before_the_step_has_written_it(name: str, on_cpu: CudaOnCpu) -> None:
    """Tokens of one prompt are rows of their own. Earlier kernels of the layer write them as late as they may."""
    lengths = [150] if name == "few_heads" else [148, 149, 150]
    stored = scattered_contexts([150], WIDTH)
    query, table = torch.randn(len(lengths), 16, WIDTH).bfloat16(), stored.block_table.repeat(len(lengths), 1)
    plan = plan_decode(table, torch.tensor(lengths).int(), written_tokens=40)
    expected = reference.mla_decode(query.float(), stored.pool.float(), plan, LATENT, SCALE, 1.0)
    written = stored.pool.bfloat16()
    before = written.clone()
    before[stored.block_table[0, 1], -18:] = 100
    before[stored.block_table[0, 2]] = 100
    module = on_cpu.module(f"mla_decode.{name}")
    copying = f"for (int i = 0; i < {written.nbytes}; i++) ((u8*)given.pool)[i] = given.pool[i + {written.nbytes}];"
    on_cpu.make_mistake(module.SOURCE, "wait_for_earlier();", f"if (threadIdx.x == 0) {copying}")
    for _ in range(LAUNCHES):
        # What the pool holds until the kernel waits, and then.
        pool = torch.cat([before, written])
        assert relative_error(module.attend(query, pool, plan, SCALE).joined(), expected) < 0.01
