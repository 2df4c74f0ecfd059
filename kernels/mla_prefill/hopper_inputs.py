"""The inputs of our Hopper kernels of attention over prompts: `Inputs` of `cuda/tiles.cuh`."""

import ctypes
import math
from pathlib import Path

import torch

from kernels.hopper import is_hopper, processors
from kernels.mla_prefill.tiles import QUERIES
from kernels.nvrtc import encode_rows
from kernels.structures import structure

# DeepSeek-V3's widths of a head: its own channels of the keys, those that all heads share, and values.
OWN, ROPE, VALUE = 128, 64, 128
THREADS = 384
Inputs = structure(Path(__file__).parent / "cuda" / "tiles.cuh", "Inputs")
BOX_BYTES = 128
# How many bytes of the second-level cache the keys and values of heads attended to at the same time may take.
CACHED_BYTES = 32 << 20


def takes(query: torch.Tensor, own: torch.Tensor, shared: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether kernels of DeepSeek-V3's widths compute it."""
    return (own.shape[2], shared.shape[1], value.shape[2]) == (OWN, ROPE, VALUE) and can_copy(query, own, shared, value)


def can_copy(query: torch.Tensor, own: torch.Tensor, shared: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the copy engine of a Hopper GPU can read these rows, in bf16."""
    return (
        query.dtype == torch.bfloat16
        and is_hopper(query.device)
        and has_rows(query)
        and has_rows(own)
        and has_rows(value)
        and has_rows(shared.unsqueeze(1))
    )


def has_rows(part: torch.Tensor) -> bool:
    """Whether all heads of a row lie within it, and rows and heads begin at multiples of 16 bytes."""
    row, head, _ = part.stride()
    aligned = part.data_ptr() % 16 == 0 and row % 8 == 0 and head % 8 == 0
    return aligned and row >= (part.shape[1] - 1) * head + part.shape[2]


# Outputs; and [heads, queries] the scales of outputs that are quantized, or log-sums, if there are any.
Results = tuple[torch.Tensor, torch.Tensor | None]


def address_and_stride(of_rows: torch.Tensor | None) -> tuple[int | None, int]:
    """The second of `Results` as kernels take it: its address, or None, and its stride."""
    return (None, 0) if of_rows is None else (of_rows.data_ptr(), of_rows.stride(0))


def prepare_inputs(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    results: Results,
    taken: torch.Tensor,
    *,
    tile_count: int,
    box_keys: int,
    scale: float,
) -> ctypes.Structure:
    """`Inputs` of the source. taken: [1] int32, zero; box_keys: how many rows of keys and values a copy takes."""
    out, of_rows = results
    queries, heads, _ = query.shape
    address, stride = address_and_stride(of_rows)
    return Inputs(
        query_boxes=boxes(query, QUERIES // 2), own_boxes=boxes(own, box_keys), shared_boxes=boxes(shared, box_keys),
        value_boxes=boxes(value, box_keys), taken=taken.data_ptr(), out=out.data_ptr(), of_rows=address,
        tile_count=tile_count, heads=heads, total_queries=queries,
        heads_together=heads_together(own.shape[0] * (own.shape[2] + value.shape[2]) * 2, heads),
        query_head=query.stride(1) * query.element_size(), own_head=own.stride(1) * own.element_size(),
        value_head=value.stride(1) * value.element_size(), row_stride=stride,
        out_row=out.stride(0) * out.element_size(), scale_log2=scale * math.log2(math.e),
    )  # fmt: skip


def blocks_of_launch(units: int, device: torch.device) -> int:
    """A block fills a multiprocessor and takes one tile of a head after another."""
    return min(units, processors(device))


def boxes(part: torch.Tensor, rows: int) -> ctypes.Array[ctypes.c_uint64]:
    """The tensor map of bfloat16 rows, of all heads or none, for boxes of 64 channels of one head."""
    return encode_rows(part.data_ptr(), part.shape[0], 2 * part.stride(0), rows, BOX_BYTES)


def heads_together(head_bytes: int, heads: int) -> int:
    """How many heads' tiles are taken at a time. head_bytes: of a head's keys and values."""
    return min(max(CACHED_BYTES // head_bytes, 1), heads)
