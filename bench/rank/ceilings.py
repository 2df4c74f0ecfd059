"""Measures the highest rates of the device."""

import torch

from bench.kernels.timing import time_graph
from capacity.ceilings import Ceilings

COPY_BYTES = 4 << 30
GEMM_SIZE = 8192
# After so long a card at its power limit has lowered its clocks. Products are a sixth faster in a burst before that.
SUSTAINED_SECONDS = 0.5


def measure_ceilings(device: torch.device, after_seconds: float = 0.0) -> Ceilings:
    """Measure each rate after `after_seconds` of the same work. Takes about 4 GiB for a moment.

    The data is random, because on zeros matrix products run faster than they ever do in practice.
    """
    return Ceilings(
        bytes_per_second=COPY_BYTES / _copy_seconds(device, after_seconds),
        bf16_flops=2 * GEMM_SIZE**3 / _bf16_seconds(device, after_seconds),
        fp8_flops=2 * GEMM_SIZE**3 / _fp8_seconds(device, after_seconds),
    )


def _copy_seconds(device: torch.device, after_seconds: float) -> float:
    source = torch.randn(COPY_BYTES // 8, device=device)
    target = torch.empty_like(source)
    # In a graph copy_ would run on the copy engine, which is slower than a kernel.
    return time_graph([lambda: torch.neg(source, out=target)], after_seconds=after_seconds)


def _bf16_seconds(device: torch.device, after_seconds: float) -> float:
    a, b = (_random(device, torch.bfloat16) for _ in range(2))
    return time_graph([lambda: a @ b.t()], after_seconds=after_seconds)


def _fp8_seconds(device: torch.device, after_seconds: float) -> float:
    a, b = (_random(device, torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)

    def multiply() -> torch.Tensor:
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return time_graph([multiply], after_seconds=after_seconds)


def _random(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(GEMM_SIZE, GEMM_SIZE, device=device).to(dtype)
