"""Values of attended latents whose pieces are joined on the way, on the CPU."""

import ctypes
from dataclasses import dataclass

import pytest
import torch

from kernels.act_quant import dequantize
from kernels.mla_decode.attended import Attended
from kernels.mla_projections import reference
from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.errors import relative_error

HEADS, LATENT, VALUE, PARTS = 2, 512, 128, 40


@dataclass(frozen=True)
class Pieces:
    work: ctypes.Structure
    kept: tuple[torch.Tensor, ...]

    def join(self) -> None:
        raise AssertionError("pieces are joined on the way")


def in_pieces(counts: list[int], on_cpu: CudaOnCpu) -> tuple[Attended, torch.Tensor]:
    """Requests of one token in this many pieces, none in one; and their latents joined: [tokens, heads, latent]."""
    slots, rows = sum(counts), len(counts)
    values, log_sums = torch.randn(slots, HEADS, LATENT).bfloat16(), torch.randn(slots, HEADS)
    latents, splits = torch.randn(rows, HEADS, LATENT).bfloat16(), torch.zeros(PARTS, 4, dtype=torch.int32)
    joined, first = latents.float(), 0
    split = [row for row, count in enumerate(counts) if count]
    for index, row in enumerate(split):
        stop = first + counts[row]
        splits[index, :3] = torch.tensor([row, first, stop])
        shares = torch.softmax(log_sums[first:stop] * torch.log(torch.tensor(2.0)), dim=0)
        joined[row] = (values[first:stop].float() * shares.unsqueeze(2)).sum(0)
        first = stop
    work = on_cpu.module("mla_decode.parts").Work(
        out=latents.data_ptr(), values=values.data_ptr(), log_sums=log_sums.data_ptr(),
        split_requests=splits.data_ptr(), requests=rows, query_tokens=1, heads=HEADS, part_count=PARTS,
    )  # fmt: skip
    return Attended(latents, Pieces(work, (values, log_sums, splits))), joined


@pytest.mark.parametrize("counts", [[30], [0, 9], [3, 2]], ids=str)
def test_pieces_become_values_quantized_or_not(counts: list[int], on_cpu: CudaOnCpu) -> None:
    pieces = on_cpu.module("mla_projections.pieces")
    weight = torch.randn(HEADS, 3 * VALUE, LATENT).bfloat16()[:, -VALUE:].transpose(1, 2) / LATENT**0.5
    attended, joined = in_pieces(counts, on_cpu)
    expected = reference.expand_values(joined.bfloat16().float(), weight.float())
    assert relative_error(pieces.expand_pieces(attended, weight), expected) < 5e-3
    quantized = dequantize(pieces.expand_pieces_quantized(attended, weight))
    assert relative_error(quantized.view_as(expected), expected) < 0.04
