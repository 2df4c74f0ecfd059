"""Gathers the parts that all ranks have of several tensors, or that some ranks have: `cuda/gather.cu`."""

import ctypes
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from kernels.hopper import is_hopper
from kernels.nvrtc import load_kernel
from kernels.peer_exchange.region import (
    LINE_UNITS,
    MOST_WORD_UNITS,
    SLOT_BLOCK,
    UNIT_BYTES,
    slot_blocks,
    template_ranks,
    unit_blocks,
)
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "gather.cu"
GatherArguments = structure(SOURCE, "GatherArguments")
MOST_PARTS = 6
# Dtypes in which a word of all ones is no number: their values need no flag on their way.
NUMBERS = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
# Up to this many units with flags, counted once for each other rank, are faster than slots: measured, see notes.md.
LINES_BEST_UNITS = 32768


def gather(members: ctypes.Structure, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    """Fill each output, [ranks * rows, ...], with the parts of all ranks, [rows, ...] of the same dtype.

    A part and its output are both contiguous, or both matrices whose rows lie next to each other (stride 1). A NaN may
    become another NaN; all else arrives bit for bit.
    """
    assert len(outputs) == len(parts) <= MOST_PARTS
    arguments = _arguments(members, [range(members.ranks)] * members.ranks)
    pairs = list(zip(outputs, parts, strict=True))
    for output, part in pairs:
        if part.dtype not in NUMBERS:
            _add(arguments, output, part)
    arguments.byte_units = arguments.units
    for output, part in pairs:
        if part.dtype in NUMBERS:
            _add(arguments, output, part)
    if arguments.units:
        _launch(arguments, parts[0].device, by_slots=_needs_slots(arguments))


def broadcast(members: ctypes.Structure, output: torch.Tensor, values: torch.Tensor, source: int) -> None:
    """Fill the output with the values of the member `source`; both contiguous."""
    _copy(members, [[source]] * members.ranks, [output], [values])


def copy_between(members: ctypes.Structure, tensors: Sequence[torch.Tensor], sources: Sequence[int]) -> None:
    """Fill the tensors of each member with those of its source, which may be itself. In place; contiguous. sources: for
    each member, the member whose tensors it gets.

    A rank sends to those that receive from it, and no others: two that swap B bytes take as long as B bytes one way. A
    thread sends what a unit held before it writes what came for it.
    """
    assert len(tensors) <= MOST_PARTS and all(tensor.is_contiguous() for tensor in tensors)
    senders = [[source] if source != member else [] for member, source in enumerate(sources)]
    _copy(members, senders, tensors, tensors)


def barrier(members: ctypes.Structure, device: torch.device) -> None:
    """No kernel launched later begins before the ones launched earlier have ended on all ranks."""
    _launch(_arguments(members, []), device, by_slots=True)


def load(device: torch.device, ranks: int) -> None:
    """Compile what such a group launches; not possible while a graph is captured."""
    load_kernel(SOURCE, f"gather_units_{template_ranks(ranks)}", device.index or 0)
    load_kernel(SOURCE, "gather_slots", device.index or 0)


def _arguments(members: ctypes.Structure, senders: Sequence[Iterable[int]]) -> ctypes.Structure:
    """senders: for each member, those whose parts it receives."""
    arguments = GatherArguments(members=members)
    for member, each in enumerate(senders):
        arguments.senders[member] = sum(1 << sender for sender in each)
    return arguments


def _copy(
    members: ctypes.Structure,
    senders: Sequence[Iterable[int]],
    outputs: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor],
) -> None:
    """Send the parts. Each member receives from one at most."""
    arguments = _arguments(members, senders)
    for output, part in zip(outputs, parts, strict=True):
        _add(arguments, output, part)
    for index in range(arguments.part_count):
        arguments.parts[index].rank_pitch = 0
    if arguments.units:
        _launch(arguments, parts[0].device, by_slots=True)


def _add(arguments: ctypes.Structure, output: torch.Tensor, part: torch.Tensor) -> None:
    if not part.numel():
        return
    added = arguments.parts[arguments.part_count]
    added.input, added.output = part.data_ptr(), output.data_ptr()
    lines = 1
    if part.is_contiguous() and output.is_contiguous():
        added.rank_pitch = added.line_bytes = part.numel() * part.itemsize
    else:
        (rows, lines), (total, columns) = part.shape, output.shape
        assert columns == lines and (rows == 1 or part.stride(0) == 1) and (total == 1 or output.stride(0) == 1)
        added.rank_pitch = added.line_bytes = rows * part.itemsize
        added.input_pitch, added.output_pitch = part.stride(1) * part.itemsize, output.stride(1) * part.itemsize
    added.line_units = -(-added.line_bytes // UNIT_BYTES)
    added.first_unit = arguments.units
    arguments.part_count += 1
    arguments.units += lines * added.line_units


def _needs_slots(arguments: ctypes.Structure) -> bool:
    byte_units: int = arguments.byte_units
    if arguments.units > MOST_WORD_UNITS:
        return True
    blocks, _, _ = unit_blocks(arguments.units)
    warps = -(-byte_units // 32)
    lines = -(-warps // blocks) * 32
    copies: int = arguments.members.ranks - 1
    return lines > LINE_UNITS or byte_units * copies > LINES_BEST_UNITS


def _launch(arguments: ctypes.Structure, device: torch.device, *, by_slots: bool) -> None:
    if by_slots:
        name, threads = "gather_slots", SLOT_BLOCK
        blocks, arguments.turn_units = slot_blocks(arguments.units)
    else:
        name = f"gather_units_{template_ranks(arguments.members.ranks)}"
        blocks, threads, arguments.turn_units = unit_blocks(arguments.units)
    kernel = load_kernel(SOURCE, name, device.index or 0)
    kernel.launch((blocks, 1, 1), threads, arguments, dependent=is_hopper())
