"""Attention of one token with few heads on the CPU, by the sources that compute it and join its pieces."""

import pytest
import torch

from kernels.mla_decode import plan_decode, reference
from kernels.mla_projections.reference import expand_values
from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.errors import relative_error
from tests.support.latents import scattered_contexts

LATENT, WIDTH, VALUE, SCALE = 512, 576, 128, 0.05


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
