"""The indexer's queries and quantized keys on Hopper, a warp a row: `cuda/rows.cu`."""

import ctypes
from pathlib import Path

import torch

from kernels.hopper import is_hopper
from kernels.index_keys.queries import IndexQueries
from kernels.nvrtc import load_kernel
from kernels.structures import structure
from kernels.tile_sizes import cdiv

SOURCE = Path(__file__).parent / "cuda" / "rows.cu"
Rows = structure(SOURCE, "Rows")
KeyArguments, QueryArguments = structure(SOURCE, "KeyArguments"), structure(SOURCE, "QueryArguments")
# Values of a row, and of them those of a lane.
WIDTH, OWN, THREADS = 128, 4, 256
WARPS = THREADS // 32


def takes(projected: torch.Tensor, rotations: torch.Tensor, quantized: bool) -> bool:
    """Whether these kernels compute it: bf16 rows of DeepSeek-V3.2's width for a quantized pool, on Hopper."""
    return (
        quantized
        and projected.dtype == torch.bfloat16
        and projected.shape[-1] == WIDTH
        and projected.stride(-2) % OWN == 0
        and rotations.shape[1] % OWN == 0
        and is_hopper(projected.device)
    )


def write_keys(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    epsilon: float,
    rotations: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    interleaved: bool,
) -> None:
    arguments = KeyArguments(
        rows=_rows(projected, rotations, interleaved), weight=weight.data_ptr(), bias=bias.data_ptr(),
        slots=slots.data_ptr(), pool=pool.data_ptr(), epsilon=epsilon,
    )  # fmt: skip
    _launch("write_keys", len(projected), arguments, projected.device)


def make_queries(
    projected: torch.Tensor,
    weights: torch.Tensor,
    factor: float,
    rotations: torch.Tensor,
    quantized: bool,
    interleaved: bool,
) -> IndexQueries:
    assert quantized
    values, scaled = torch.empty_like(projected, dtype=torch.float8_e4m3fn), torch.empty_like(weights[0])
    arguments = QueryArguments(
        rows=_rows(projected, rotations, interleaved), weights=weights.data_ptr(), values=values.data_ptr(),
        scaled=scaled.data_ptr(), heads=projected.shape[1], shares=len(weights), factor=factor,
    )  # fmt: skip
    _launch("make_queries", scaled.numel(), arguments, projected.device)
    return IndexQueries(values, scaled)


def _rows(projected: torch.Tensor, rotations: torch.Tensor, interleaved: bool) -> ctypes.Structure:
    return Rows(
        projected=projected.data_ptr(), turns=rotations.data_ptr(), rows=projected.numel() // WIDTH,
        stride=projected.stride(-2) // OWN,
        pairs=rotations.shape[1], interleaved=interleaved,
    )  # fmt: skip


def _launch(name: str, rows: int, arguments: ctypes.Structure, device: torch.device) -> None:
    if rows:
        kernel = load_kernel(SOURCE, name, device.index or 0)
        kernel.launch((cdiv(rows, WARPS), 1, 1), THREADS, arguments, dependent=True)
