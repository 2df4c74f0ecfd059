"""NVFP4 weights in the order in which the product on Hopper takes them, and how it is cut."""

import pytest
import torch

from kernels.nvfp4_gemm.packing import CODE_BYTES, SCALE_BYTES, pack, unpack
from kernels.nvfp4_gemm.tiling import choose_tiling
from kernels.nvfp4_quant import dequantize_nvfp4
from tests.support.errors import assert_close

PROCESSORS = 132


def random_matrix(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Any codes, and any scales: negative ones, subnormal ones, zeros and no numbers."""
    codes = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8)
    scales = torch.randint(256, (outputs, inputs // 16), dtype=torch.uint8)
    return codes, scales.view(torch.float8_e4m3fn)


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (192, 384), (128, 1024)])
def test_unpacking_gives_the_values_that_were_packed(outputs: int, inputs: int) -> None:
    codes, scales = random_matrix(outputs, inputs)
    packed = pack(codes, scales)
    assert [each.shape for each in packed] == [
        (inputs // 128, outputs // 64, CODE_BYTES),
        (inputs // 128, outputs // 64, SCALE_BYTES),
    ]
    # Packed weights take as many bytes as published ones.
    assert [each.nbytes for each in packed] == [codes.nbytes, scales.nbytes]
    expected = dequantize_nvfp4(codes, scales)
    assert_close(dequantize_nvfp4(*unpack(*packed)), expected, rtol=0, atol=0, equal_nan=True)


def test_parts_of_a_matrix_are_packed_as_the_whole() -> None:
    codes, scales = random_matrix(256, 512)
    whole, part = pack(codes, scales), pack(codes[64:192, 128:].contiguous(), scales[64:192, 16:].contiguous())
    assert all(torch.equal(own, every[2:, 1:3]) for own, every in zip(part, whole, strict=True))


def test_a_few_operations_on_words_make_bfloat16_weights() -> None:
    """As the kernel decodes: word w of half h of a thread is for inputs h * 64 + w * 16 of the tile."""
    codes, scales = random_matrix(64, 128)
    scales.view(torch.uint8)[scales.isnan()] = 0
    packed_codes, packed_scales = (each[0, 0].view(torch.int32).long() & 0xFFFFFFFF for each in pack(codes, scales))
    word, pair = packed_codes.view(2, 4, 8, 4, 4), packed_scales.view(2, 4, 8, 1, 2, 1)
    swapped = (pair & 0x00FF00FF) << 8 | pair >> 8 & 0x00FF00FF
    scale = torch.cat([pair, swapped], dim=-1).flatten(-2) & 0x0FF00FF0 | 0x70007000
    values = dequantize_nvfp4(codes, scales)
    # Half, warp, thread / 4, thread % 4, word.
    half, warp, row, quad, step = (torch.arange(size).view([-1 if i == at else 1 for i in range(5)])
                                   for at, size in enumerate((2, 4, 8, 4, 4)))  # fmt: skip
    for at, numbers in enumerate((word, word << 6, word >> 4 | word << 28, word << 2 ^ word >> 6)):
        for of_pair in range(2):
            number = (numbers & 0x81C081C0) >> 16 * of_pair & 0xFFFF
            own_scale = scale >> 16 * (at % 2) & 0xFFFF
            found = bfloat16(number) * bfloat16(own_scale) * 2.0**8
            outputs, inputs = warp * 16 + at % 2 * 8 + row, half * 64 + step * 16 + at // 2 * 8 + quad * 2 + of_pair
            assert torch.equal(found, values[outputs, inputs])


def bfloat16(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.uint16).view(torch.bfloat16).double()


@pytest.mark.parametrize(("rows", "expected"), [(1, 16), (16, 32), (32, 48), (64, 96), (96, 128), (4096, 128)])
def test_a_tile_holds_most_experts_rows(rows: int, expected: int) -> None:
    assert choose_tiling(32 * rows, 32, 4096, 7168, PROCESSORS).rows == expected


def test_tiles_have_more_outputs_where_multiprocessors_stay_occupied() -> None:
    # 256 tiles of 512 outputs are nearly two for each. With 448 the fourth round would be half empty.
    assert choose_tiling(32, 32, 4096, 7168, PROCESSORS).outputs == 512
    assert choose_tiling(32, 32, 7168, 2048, PROCESSORS).outputs == 256


@pytest.mark.parametrize("rows", [1, 16, 17, 64])
def test_a_dense_layer_occupies_more_multiprocessors_with_narrow_tiles(rows: int) -> None:
    tiling = choose_tiling(rows, 1, 7168, 16384, PROCESSORS)
    assert tiling.split > 1
    assert 7168 // tiling.outputs * -(-rows // tiling.rows) >= PROCESSORS // 2


def test_warpgroups_share_only_what_they_can_divide() -> None:
    for groups in range(1, 9):
        for rows in (1, 16, 17, 64):
            assert groups % choose_tiling(rows, 1, 7168, groups * 128, PROCESSORS).split == 0
