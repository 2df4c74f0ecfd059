"""GHASH of a pool's pieces: by the kernels what GMAC hides, on a GPU and on the CPU."""

import pytest
import torch

from kernels.ghash import hash_pieces, reference
from tests.support.hashed_pieces import PIECES, hashed_pieces


def test_the_definition_hashes_the_standards_example() -> None:
    """Test case 2 of McGrew and Viega, "The Galois/Counter Mode of Operation", 2004."""
    key, text = bytes.fromhex("66e94bd4ef8a2c3b884cfa59ca342b2e"), bytes.fromhex("0388dace60b6a392f328c2b971b2fe78")
    hashed = reference.ghash(key, text + bytes(8) + (128).to_bytes(8))
    assert hashed.hex() == "f38cbb1ad69223dcc3457ae5b6b0f885"


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [*PIECES, (73728,)], ids=str)
def test_a_gpu_hashes_as_the_definition_does(widths: tuple[int, ...]) -> None:
    planes, *job = hashed_pieces(widths)
    reference.hash_pieces(planes, *job)
    locked = [each.pin_memory() for each in job]
    locked[-1].zero_()
    hash_pieces([plane.cuda() for plane in planes], *locked)
    torch.cuda.synchronize()
    assert torch.equal(locked[-1], job[-1])
