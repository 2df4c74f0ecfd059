"""Our attention to selected tokens of an e4m3 pool on Hopper: `cuda/fp8_selected.cu`."""

import ctypes
from pathlib import Path

import torch

from kernels.mla_decode import fp8
from kernels.mla_decode.fp8 import takes
from kernels.mla_decode.parts import DividedWork
from kernels.nvrtc import load_kernel
from kernels.structures import structure

__all__ = ["attend", "takes"]

SOURCE = Path(__file__).parent / "cuda" / "fp8_selected.cu"
SelectedArguments = structure(SOURCE, "SelectedArguments")


def attend(
    query: torch.Tensor,
    pool: torch.Tensor,
    divided: DividedWork,
    selection: ctypes.Structure,
    scale: float,
    kv_scale: float,
) -> None:
    """Launch the kernel. selection: `Selection` of `cuda/gather.cuh`."""
    attention = fp8.arguments(query, pool, divided, scale, kv_scale)
    kernel = load_kernel(SOURCE, "selected", query.device.index or 0)
    divided.attend(kernel, fp8.THREADS, SelectedArguments(attention=attention, selection=selection))
