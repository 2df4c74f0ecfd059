"""deep_gemm's products, called by our adapters, against their definitions."""

import pytest
import torch

from bench.kernels.deepseek_r1 import LINEAR_LAYERS
from kernels.act_quant import quantize
from kernels.block_quant import quantize_blocks
from kernels.fp8_gemm import BlockScaled, block_scaled, deep_gemm, reference
from kernels.grouped_gemm import deep_gemm as grouped_deep_gemm
from kernels.grouped_gemm import reference as grouped_reference
from kernels.moe_permute import expand_contiguous, expand_masked
from tests.support.errors import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(not deep_gemm.available(), reason="needs deep_gemm"),
]


def random_weight(*shape: int) -> BlockScaled:
    *leading, outputs, inputs = shape
    parts = [quantize_blocks(torch.randn(outputs, inputs, device="cuda")) for _ in range(leading[0] if leading else 1)]
    values, scales = (torch.stack(found).view(*leading, *found[0].shape) for found in zip(*parts, strict=True))
    return block_scaled(values, scales)


@pytest.mark.parametrize("rows", [0, 1, 5, 130])
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 128), LINEAR_LAYERS["q_a, kv_a"]])
def test_rows_are_multiplied_by_the_weight(rows: int, outputs: int, inputs: int) -> None:
    x, weight = quantize(torch.randn(rows, inputs, device="cuda")), random_weight(outputs, inputs)
    assert relative_error(deep_gemm.fp8_gemm(x, weight), reference.fp8_gemm(x, weight)) < 5e-3


@pytest.mark.parametrize("tokens", [0, 1, 70, 300])
@pytest.mark.parametrize("expand", [expand_masked, expand_contiguous])
def test_rows_are_multiplied_by_their_experts_weights(tokens: int, expand: type) -> None:
    # Half of the tokens share one expert.
    chosen = torch.randint(1, 6, (tokens, 1), device="cuda")
    chosen[::2] = 0
    weight = random_weight(6, 256, 384)
    x = expand(quantize(torch.randn(tokens, 384, device="cuda")), chosen, 6)
    used = x.positions.flatten()
    found, expected = (
        module.grouped_fp8_gemm(x.rows, weight, x.layout).flatten(0, -2)[used]
        for module in (grouped_deep_gemm, grouped_reference)
    )
    assert relative_error(found, expected) < 5e-3
