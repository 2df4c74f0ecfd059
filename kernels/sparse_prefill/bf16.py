"""Our attention over kept blocks of bf16 on Hopper: `cuda/bf16_sparse_prefill.cu`."""

from pathlib import Path

import torch

from kernels.act_quant.quantized import QuantizedRows, cuda_macros
from kernels.mla_prefill.hopper_inputs import THREADS, Results, blocks_of_launch, prepare_inputs
from kernels.nvrtc import load_kernel
from kernels.sparse_prefill.line_masses import BLOCK_KEYS
from kernels.sparse_prefill.triton_blocks import BlockLists
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "bf16_sparse_prefill.cu"
Arguments = structure(SOURCE, "Arguments")


def sparse_prefill(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    kept: BlockLists,
    out: torch.Tensor,
    log_sum: torch.Tensor,
    first_query: int,
    scale: float,
) -> None:
    _attend("attend_blocks", query, own, shared, value, kept, (out, log_sum), first_query, scale)


def sparse_prefill_and_quantize(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    kept: BlockLists,
    out: QuantizedRows,
    first_query: int,
    scale: float,
) -> None:
    results = out.values, out.scales.t()
    macros = cuda_macros(out.powers)
    _attend("attend_blocks_and_quantize", query, own, shared, value, kept, results, first_query, scale, macros)


def _attend(
    name: str,
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    kept: BlockLists,
    results: Results,
    first_query: int,
    scale: float,
    macros: tuple[str, ...] = (),
) -> None:
    if not query.shape[0]:
        return
    _, tiles, blocks = kept.lists.shape
    taken = torch.zeros(1, dtype=torch.int32, device=query.device)
    inputs = prepare_inputs(
        query, own, shared, value, results, taken, tile_count=tiles, box_keys=BLOCK_KEYS, scale=scale
    )
    kernel = load_kernel(SOURCE, name, query.device.index or 0, macros)
    arguments = Arguments(
        inputs=inputs, lists=kept.lists.data_ptr(), counts=kept.counts.data_ptr(), blocks=blocks,
        total_keys=own.shape[0], first_query=first_query,
    )  # fmt: skip
    kernel.launch((blocks_of_launch(inputs.tile_count * inputs.heads, query.device), 1, 1), THREADS, arguments)
