"""Residual addition, norm and quantization with the exchange before or after it, on Hopper: `cuda/norm.cu`."""

import ctypes
from collections.abc import Mapping
from pathlib import Path

import torch

from kernels.act_quant.quantized import GROUP, Quantized, cuda_macros, empty_quantized
from kernels.hopper import is_hopper
from kernels.moe_permute import ExpertOutputs
from kernels.moe_permute.experts import expert_sum
from kernels.norm import Delta
from kernels.nvrtc import load_kernel
from kernels.peer_exchange.exchanged_norm import ExchangedNorm, SummedRows
from kernels.peer_exchange.region import CHANNELS, template_ranks
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "norm.cu"
NormArguments = structure(SOURCE, "NormArguments")
# CTAs of a row, values of a thread, and the most threads of a CTA.
CTAS, VALUES, NORM_THREADS = 4, 8, 256
# Kernels, by which rows of a sum are made before the norm, and whether rows are gathered after it.
NAMES: Mapping[tuple[SummedRows | None, bool], str] = {
    (SummedRows.OWN, False): "sum_norm",
    (SummedRows.ALL, False): "all_sum_norm",
    (None, True): "norm_gather",
    (SummedRows.OWN, True): "sum_norm_gather",
}
# The kernel that adds up experts' outputs as well, and how many of each row it takes.
EXPERTS_NAME, CHOICES = "all_experts_norm", 8


def takes(delta: Delta, residual: torch.Tensor, norm: ExchangedNorm) -> bool:
    """Whether the kernel supports these tensors. The same on all ranks: it looks at no address."""
    rows, width = residual.shape
    fits = 0 < rows * CTAS <= CHANNELS and width % (CTAS * 2 * GROUP) == 0 and width // (CTAS * VALUES) <= NORM_THREADS
    if isinstance(delta, ExpertOutputs):
        fits = fits and norm.sums is SummedRows.ALL and delta.positions.shape[1] == CHOICES
        dtype = delta.rows.dtype
    else:
        dtype = delta.dtype
    return is_hopper() and dtype == residual.dtype == torch.bfloat16 and fits


def add_rms_norm(
    members: ctypes.Structure, delta: Delta, residual: torch.Tensor, norm: ExchangedNorm
) -> tuple[torch.Tensor | None, Quantized | None]:
    """Add `delta` to this rank's rows of the residual in place, and normalize them; for tensors that it `takes`.

    delta: [ranks * rows, width] if each rank gets its own rows of the sum, else [rows, width] as residual.
    """
    rows, width = residual.shape
    assert delta.shape[0] == (members.ranks * rows if norm.sums is SummedRows.OWN else rows)
    assert all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (residual, norm.weight))
    count = rows if norm.all_rows is None else norm.all_rows
    plain = residual.new_empty(count, width) if norm.plain else None
    arguments = NormArguments(members=members, rows=rows, all_rows=count, width=width, epsilon=norm.epsilon)
    arguments.residual, arguments.weight = residual.data_ptr(), norm.weight.data_ptr()
    arguments.plain = None if plain is None else plain.data_ptr()
    if isinstance(delta, ExpertOutputs):
        name, arguments.experts = EXPERTS_NAME, expert_sum(delta)
    else:
        assert delta.is_contiguous() and delta.data_ptr() % 16 == 0
        name, arguments.delta = NAMES[norm.sums, norm.all_rows is not None], delta.data_ptr()
    quantized = empty_quantized(count, width, device=residual.device, powers=norm.powers) if norm.quantizes else None
    if quantized is not None:
        arguments.values, arguments.scales = quantized.values.data_ptr(), quantized.scales.data_ptr()
        arguments.scale_stride = quantized.scales.stride(1)
    name, macros = f"{name}_{template_ranks(members.ranks)}", cuda_macros(norm.powers)
    kernel = load_kernel(SOURCE, name, residual.device.index or 0, macros)
    kernel.launch((rows * CTAS, 1, 1), width // (CTAS * VALUES), arguments, cluster=CTAS, dependent=True)
    return plain, quantized


def load(device: torch.device, ranks: int) -> None:
    """Compile what such a group launches, but for norms with scales that are powers of two; not possible while a graph
    is captured.
    """
    if is_hopper(device):
        for name in (*NAMES.values(), EXPERTS_NAME):
            load_kernel(SOURCE, f"{name}_{template_ranks(ranks)}", device.index or 0)
