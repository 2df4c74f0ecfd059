"""Packing of INT4 experts in place, in Triton, against its definition."""

import pytest
import torch

from kernels.w4a8_gemm import Int4Experts, pack_published, triton
from kernels.w4a8_gemm.operands import WEIGHT_BYTES, tile_bytes

# Without a GPU the kernel runs in Triton's interpreter; see conftest.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Two weights a byte, of which none is -8.
NONE_LEAST = torch.tensor([low & 15 | high << 4 for low in range(-7, 8) for high in range(-7, 8)]).to(torch.int8)


def published(experts: int, outputs: int, inputs: int, group: int, least: int) -> torch.Tensor:
    """Random tiles, with this many weights of -8."""
    tiles = torch.randint(256, (experts, outputs // 64, inputs // 128, tile_bytes(group)), dtype=torch.uint8)
    weights = NONE_LEAST[torch.randint(len(NONE_LEAST), (*tiles.shape[:-1], WEIGHT_BYTES))]
    for place in torch.randint(weights.numel(), (least,)).tolist():
        weights.view(-1)[place] = [0x28, -0x7E][place % 2]
    tiles[..., :WEIGHT_BYTES] = weights.view(torch.uint8)
    return tiles


@pytest.mark.parametrize("least", [0, 1, 5])
@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("group", [128, 32])
@pytest.mark.parametrize("shape", [(1, 64, 128), (3, 256, 384)], ids=str)
def test_published_experts_are_packed_in_place(
    shape: tuple[int, int, int], group: int, in_turns: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = published(*shape, group, least)
    expected: Int4Experts = pack_published(tiles.clone(), in_turns)
    # Two experts at a time.
    monkeypatch.setattr(triton, "COPY_BYTES", 2 * tiles[0].numel())
    found = tiles.to(DEVICE)
    assert triton.pack_published(found, in_turns) == expected.has_minimum == (least > 0)
    assert torch.equal(found.cpu(), expected.tiles)
