"""Our attention over kept blocks of bf16 on Hopper: `cuda/bf16_sparse_prefill.cu`."""

import ctypes
from pathlib import Path

import torch

from kernels.mla_prefill.hopper_inputs import THREADS, Inputs, blocks_of_launch, empty_results, prepare_inputs
from kernels.nvrtc import load_kernel
from kernels.sparse_prefill.line_masses import BLOCK_KEYS
from kernels.sparse_prefill.triton_blocks import BlockLists

SOURCE = Path(__file__).parent / "cuda" / "bf16_sparse_prefill.cu"


class Arguments(ctypes.Structure):
    """`Arguments` of the source."""

    _fields_ = (
        ("inputs", Inputs),
        ("lists", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("blocks", ctypes.c_int),
        ("total_keys", ctypes.c_int),
        ("offset", ctypes.c_int),
        # The tensor maps align the structure to 64 bytes.
        ("padding", ctypes.c_byte * 36),
    )


def sparse_prefill(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    kept: BlockLists,
    offset: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    results = empty_results(query)
    if not query.shape[0]:
        return results
    _, tiles, blocks = kept.lists.shape
    taken = torch.zeros(1, dtype=torch.int32, device=query.device)
    inputs = prepare_inputs(
        query, own, shared, value, results, taken, tile_count=tiles, box_keys=BLOCK_KEYS, scale=scale
    )
    kernel = load_kernel(SOURCE, "attend_blocks", query.device.index or 0)
    arguments = Arguments(inputs, kept.lists.data_ptr(), kept.counts.data_ptr(), blocks, own.shape[0], offset)
    kernel.launch((blocks_of_launch(inputs.tile_count * inputs.heads, query.device), 1, 1), THREADS, arguments)
    return results
