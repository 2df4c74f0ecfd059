"""Products with NVFP4 weights on Hopper against their definition."""

import pytest
import torch

from kernels.nvfp4_gemm import Nvfp4, arranged, nvfp4, nvfp4_grouped_gemm, reference
from kernels.nvfp4_gemm.tiling import TILINGS, Tiling
from kernels.nvfp4_quant import dequantize_nvfp4
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

# Outputs of both parts, and inputs.
SHAPES = [(128, 128), (256, 512), (384, 1024), (1152, 896)]


def random_nvfp4(experts: int, outputs: int, inputs: int, parts: int = 2) -> Nvfp4:
    codes = torch.randint(256, (experts, outputs, inputs // 2), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(experts, outputs, inputs // 16, device="cuda") * 4).to(torch.float8_e4m3fn)
    return nvfp4(codes, scales, torch.rand(experts, parts, device="cuda") + 0.1)


def both(weight: Nvfp4, x: torch.Tensor, counts: list[int], tiling: Tiling | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours, and the definition's."""
    from kernels.nvfp4_gemm import warpgroups

    ends = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)
    expected = reference.nvfp4_grouped_gemm(x, weight, ends)
    return warpgroups.nvfp4_grouped_gemm(x, arranged(weight), ends, tiling), expected


def splits(inputs: int, tiling: Tiling) -> bool:
    return inputs // 128 % tiling.split == 0


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("counts", [[0, 1, 64, 17, 33, 0], [200, 0, 256, 129, 3, 1], [1]])
def test_ragged_experts(counts: list[int], outputs: int, inputs: int, tiling: Tiling) -> None:
    if not splits(inputs, tiling):
        pytest.skip("warpgroups cannot share the inputs")
    weight = random_nvfp4(len(counts), outputs, inputs)
    x = torch.randn(sum(counts), inputs, device="cuda").bfloat16()
    found, expected = both(weight, x, counts, tiling)
    assert relative_error(found, expected) < 5e-3
    # Each expert by itself too: a large one must not hide a small one's error.
    for one, other in zip(found.split(counts), expected.split(counts), strict=True):
        assert relative_error(one, other) < 5e-3


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_every_code_with_every_scale_is_exact(tiling: Tiling) -> None:
    inputs = 512
    codes = torch.arange(0, 16, dtype=torch.uint8, device="cuda").repeat(256, inputs // 16)
    scales = torch.arange(256, dtype=torch.uint8, device="cuda").unsqueeze(1).expand(-1, inputs // 16).contiguous()
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous()
    weight = nvfp4(packed[None], scales.view(torch.float8_e4m3fn)[None], torch.ones(1, 1, device="cuda"))
    values = dequantize_nvfp4(weight.codes[0], weight.scales[0])
    identity = torch.eye(inputs, device="cuda").bfloat16()
    found, _ = both(weight, identity, [inputs], tiling)
    number = ~values.isnan().any(1)
    assert int(number.sum()) == 254 and torch.equal(found.t()[number].float(), values[number])
    assert found.t()[~number].isnan().all()


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rows", [1, 7, 64, 200, 700])
@pytest.mark.parametrize(("outputs", "inputs"), [(576, 1536), (7168, 2048)])
def test_dense_layers(rows: int, outputs: int, inputs: int) -> None:
    weight, x = random_nvfp4(1, outputs, inputs, 1), torch.randn(rows, inputs, device="cuda").bfloat16()
    found, expected = both(weight, x, [rows], None)
    assert relative_error(found, expected) < 5e-3


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("experts", [1, 40, 512])
def test_any_number_of_experts(experts: int) -> None:
    counts = torch.randint(0, 60, (experts,)).tolist()
    weight = random_nvfp4(experts, 64, 256, 1)
    found, expected = both(weight, torch.randn(sum(counts), 256, device="cuda").bfloat16(), counts, None)
    assert relative_error(found, expected) < 5e-3


@pytest.mark.gpu
@on_hopper
def test_other_widths_stay_as_they_are_published() -> None:
    weight, x = random_nvfp4(2, 128, 192), torch.randn(9, 192, device="cuda").bfloat16()
    ends = torch.tensor([3, 9], dtype=torch.int32, device="cuda")
    kept = arranged(weight)
    assert kept is weight
    expected = reference.nvfp4_grouped_gemm(x, weight, ends)
    assert relative_error(nvfp4_grouped_gemm(x, kept, ends), expected) < 5e-3
