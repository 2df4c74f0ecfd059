"""Our attention to selected tokens of a bf16 pool on Hopper: `cuda/bf16_selected.cu`."""

import ctypes
from pathlib import Path

import torch

from kernels.mla_decode import bf16
from kernels.mla_decode.bf16 import takes
from kernels.mla_decode.parts import DividedWork
from kernels.nvrtc import load_kernel
from kernels.structures import structure

__all__ = ["attend", "takes"]

SOURCE = Path(__file__).parent / "cuda" / "bf16_selected.cu"
SelectedArguments = structure(SOURCE, "SelectedArguments")


def attend(
    query: torch.Tensor, pool: torch.Tensor, divided: DividedWork, selection: ctypes.Structure, scale: float
) -> None:
    """Launch the kernel. selection: `Selection` of `cuda/gather.cuh`."""
    attention = bf16.arguments(query, pool, divided, scale)
    kernel = load_kernel(SOURCE, "selected", query.device.index or 0)
    divided.attend(kernel, bf16.THREADS, SelectedArguments(attention=attention, selection=selection))
