"""Sums of all ranks' values: `cuda/reduce.cu`."""

import ctypes
from pathlib import Path

import torch

from kernels.hopper import is_hopper
from kernels.nvrtc import load_kernel
from kernels.peer_exchange.region import (
    MOST_WORD_UNITS,
    SLOT_BLOCK,
    UNIT_BYTES,
    slot_blocks,
    template_ranks,
    unit_blocks,
)
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "reduce.cu"
ReduceArguments = structure(SOURCE, "ReduceArguments")
NAMES = {torch.bfloat16: "bf16", torch.float32: "f32"}


def takes(values: torch.Tensor) -> bool:
    """Whether the kernels add such values: of a dtype that they know, in whole units. The same on all ranks."""
    return values.dtype in NAMES and values.numel() * values.itemsize % UNIT_BYTES == 0


def reduce_scatter(members: ctypes.Structure, output: torch.Tensor, values: torch.Tensor) -> None:
    """Fill the output with the sum of this rank's part of all ranks' values, which have `ranks` parts."""
    arguments = _arguments(members, output, values, output)
    arguments.part_pitch = arguments.units
    _launch(arguments, values)


def all_reduce(members: ctypes.Structure, output: torch.Tensor, values: torch.Tensor) -> None:
    """Fill the output with the sum of all ranks' values (one-shot)."""
    arguments = _arguments(members, output, values, values)
    _launch(arguments, values)


def all_reduce_in_two(members: ctypes.Structure, output: torch.Tensor, values: torch.Tensor) -> None:
    """`all_reduce` of `ranks` whole parts of at most MOST_WORD_UNITS, each of which one rank sums (two-shot)."""
    arguments = _arguments(members, output, values, values[: values.numel() // members.ranks])
    arguments.part_pitch, arguments.shares_sums = arguments.units, 1
    _launch(arguments, values)


def load(device: torch.device, ranks: int) -> None:
    """Compile what such a group launches; not possible while a graph is captured."""
    for name in NAMES.values():
        for way in ("words", "slots"):
            load_kernel(SOURCE, f"{way}_{name}_{template_ranks(ranks)}", device.index or 0)


def _arguments(
    members: ctypes.Structure, output: torch.Tensor, values: torch.Tensor, summed: torch.Tensor
) -> ctypes.Structure:
    assert values.dtype in NAMES and values.is_contiguous() and values.data_ptr() % UNIT_BYTES == 0
    assert output.dtype == values.dtype and output.is_contiguous()
    units, rest = divmod(summed.numel() * summed.itemsize, UNIT_BYTES)
    assert not rest
    return ReduceArguments(members=members, input=values.data_ptr(), output=output.data_ptr(), units=units)


def _launch(arguments: ctypes.Structure, values: torch.Tensor) -> None:
    suffix = f"{NAMES[values.dtype]}_{template_ranks(arguments.members.ranks)}"
    if arguments.units <= MOST_WORD_UNITS:
        name = f"words_{suffix}"
        blocks, threads, arguments.turn_units = unit_blocks(arguments.units)
    else:
        name, threads = f"slots_{suffix}", SLOT_BLOCK
        blocks, arguments.turn_units = slot_blocks(arguments.units)
    kernel = load_kernel(SOURCE, name, values.device.index or 0)
    kernel.launch((blocks, 1, 1), threads, arguments, dependent=is_hopper())
