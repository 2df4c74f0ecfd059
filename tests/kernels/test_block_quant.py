import pytest
import torch

from kernels.block_quant import dequantize_blocks, quantize_blocks


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (130, 300), (257, 64)])
def test_each_block_keeps_e4m3_precision_of_its_own_scale(shape: tuple[int, int]) -> None:
    # Blocks of very different magnitudes: one scale for the whole matrix would lose the small ones.
    weight = torch.randn(shape) * torch.logspace(-4, 4, shape[1])
    values, scale = quantize_blocks(weight)
    restored = torch.empty(shape)
    dequantize_blocks(values, scale, restored)
    for rows in range(0, shape[0], 128):
        for columns in range(0, shape[1], 128):
            block = weight[rows : rows + 128, columns : columns + 128]
            error = (restored[rows : rows + 128, columns : columns + 128] - block).abs().max()
            # Half of e4m3's last bit at the block's largest value.
            assert error <= block.abs().max() * 2**-4


def test_a_blocks_largest_magnitude_becomes_the_largest_e4m3() -> None:
    values, _ = quantize_blocks(torch.randn(200, 200))
    assert values.float().abs()[:128, :128].max() == 448


def test_a_zero_block_stays_zero() -> None:
    values, scale = quantize_blocks(torch.zeros(130, 5))
    assert not values.float().any() and torch.equal(scale, torch.ones(2, 1))


def test_dequantizing_rounds_once_to_the_targets_dtype() -> None:
    values, scale = quantize_blocks(torch.randn(140, 140))
    exact, rounded = torch.empty(140, 140), torch.empty(140, 140, dtype=torch.bfloat16)
    dequantize_blocks(values, scale, exact)
    dequantize_blocks(values, scale, rounded)
    assert torch.equal(rounded, exact.bfloat16())


def test_no_rows_write_nothing() -> None:
    out = torch.empty(0, 7)
    dequantize_blocks(torch.empty(0, 7, dtype=torch.float8_e4m3fn), torch.empty(0, 1), out)
    assert out.shape == (0, 7)
