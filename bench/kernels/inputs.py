"""Random inputs on the GPU, for the kernels' benchmarks and for their tests."""

import torch

from kernels.act_quant import Quantized, quantize
from kernels.fp8_gemm import BlockScaled, block_scaled


def random_bfloat16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def random_rows(rows: int, width: int) -> Quantized:
    return quantize(random_bfloat16(rows, width))


def random_weight(*shape: int) -> BlockScaled:
    """shape: [outputs, inputs], or with a leading expert."""
    *experts, outputs, inputs = shape
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    # Fill one matrix at a time: all experts in bfloat16 at once would take too much memory.
    for matrix in values.view(-1, outputs, inputs):
        matrix.copy_(random_bfloat16(outputs, inputs).mul_(50))
    return block_scaled(values, torch.rand(*experts, -(-outputs // 128), inputs // 128, device="cuda"))


def random_rotations(tokens: int, width: int) -> torch.Tensor:
    """[tokens, width / 2] complex numbers of magnitude 1."""
    return torch.polar(torch.ones(tokens, width // 2, device="cuda"), torch.rand(tokens, width // 2, device="cuda"))
