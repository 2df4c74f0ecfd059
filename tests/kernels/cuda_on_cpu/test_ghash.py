"""The source that hashes a pool's pieces on the CPU."""

import pytest
import torch

from kernels.ghash import reference
from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.hashed_pieces import PIECES, hashed_pieces


@pytest.mark.parametrize("widths", PIECES, ids=str)
def test_pieces_are_hashed_as_defined(widths: tuple[int, ...], on_cpu: CudaOnCpu) -> None:
    planes, pieces, keys, hashes = hashed_pieces(widths)
    reference.hash_pieces(planes, pieces, keys, hashes)
    found = torch.zeros_like(hashes)
    on_cpu.module("ghash.cuda_pieces").hash_pieces(planes, pieces, keys, found)
    assert torch.equal(found, hashes)
