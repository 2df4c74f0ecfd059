"""Streams a checkpoint's tensors into preallocated parameters, one at a time."""

import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from engine.model.parameters import Parameter, whole
from engine.weights.shards import Entry, Shards
from engine.weights.stored import (
    companions,
    global_scale_of,
    is_fp8,
    is_int4,
    is_nvfp4,
    is_quantized,
    is_unused,
    matrix_shape,
    pre_scale_name,
    scale_of,
)
from kernels.block_quant import BLOCK, dequantize_blocks
from kernels.group_quant import dequantize_groups
from kernels.nvfp4_quant import dequantize_nvfp4
from mesh.errors import CheckpointError
from mesh.progress import ProgressLog

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F8_E4M3": torch.float8_e4m3fn,
        "I8": torch.int8,
        "U8": torch.uint8,
    }
)
STAGING_BYTES = 16 << 20
NAMES_SHOWN = 5
# Forms that places keep as they are published.
KEPT: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float8_e4m3fn: "FP8", torch.int8: "INT4", torch.uint8: "NVFP4"}
)


def load_weights(
    shards: Shards,
    parameters: Sequence[Parameter],
    unused: tuple[str, ...] = (),
    *,
    elsewhere: Set[str] = frozenset(),
    quiet: bool = False,
) -> None:
    """Fill every place from the tensor of its name, converting to its dtype; quantized weights are
    dequantized, unless the place has their form.

    Places may be views (a part of a fused matrix, or several, as `Parameter` has them). Those on the CPU that are
    contiguous, of the file's dtype and filled from whole rows are read directly; peak memory is the parameters, a strip
    of 16 MiB and what it is converted to, and the largest matrix in parts. unused: prefixes of tensors that may be
    there and are not read; elsewhere: names of tensors that other ranks read, and that must be there; quiet: show no
    progress. Raises CheckpointError if a tensor is missing, has the wrong shape, or is not expected.
    """
    _check_names(shards, {parameter.name for parameter in parameters} | elsewhere, unused)
    for parameter in parameters:
        entry = shards.entries[parameter.name]
        _check(shards, entry, parameter)
    ordered = sorted(parameters, key=lambda each: (shards.entries[each.name].path, shards.entries[each.name].offset))
    read_bytes = [_read_bytes(shards.entries[each.name], each) for each in ordered]
    total_bytes = sum(read_bytes)
    logged = ProgressLog("loading weights", total_bytes)
    with _progress(quiet) as progress:
        task = progress.add_task("loading weights", total=total_bytes)
        for parameter, size_bytes in zip(ordered, read_bytes, strict=True):
            _load(shards, shards.entries[parameter.name], parameter)
            progress.advance(task, size_bytes)
            if not quiet:
                logged.advance(size_bytes)


def read_matrix(shards: Shards, name: str, device: torch.device) -> torch.Tensor:
    """One tensor as float32, dequantized. It is there, and its scales fit it."""
    entry = shards.entries[name]
    place = torch.empty(matrix_shape(entry), dtype=torch.float32, device=device)
    _load(shards, entry, whole(name, place))
    return place


def read_stored(shards: Shards, name: str) -> torch.Tensor:
    """One tensor as it is stored, on the CPU."""
    return _read(shards, shards.entries[name])


def _check_names(shards: Shards, wanted: Set[str], unused: tuple[str, ...]) -> None:
    missing = sorted(name for name in wanted if name not in shards.entries)
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_some(missing)}")
    read = {name for weight in wanted for name in companions(shards, shards.entries[weight])} | wanted
    unexpected = [
        name for name in shards.entries if name not in read and not name.startswith(unused) and not is_unused(name)
    ]
    if unexpected:
        raise CheckpointError(f"the checkpoint holds tensors that config.json does not describe: {_some(unexpected)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def _check(shards: Shards, entry: Entry, parameter: Parameter) -> None:
    if parameter.place.dtype in KEPT:
        if DTYPES[entry.dtype] != parameter.place.dtype:
            form = KEPT[parameter.place.dtype]
            raise CheckpointError(
                f"{entry.name} is {entry.dtype}: the checkpoint's configuration says that it is {form}"
            )
        shape = entry.shape
    else:
        shape = matrix_shape(entry)
    if shape != parameter.shape:
        raise CheckpointError(
            f"{entry.name} in {entry.path} has shape {list(shape)}; config.json makes it {list(parameter.shape)}"
        )
    if is_quantized(entry):
        scale_of(shards, entry)
    if is_nvfp4(entry):
        global_scale_of(shards, entry)


def _load(shards: Shards, entry: Entry, parameter: Parameter) -> None:
    place, (rows, *columns) = parameter.place, parameter.slices
    if place.shape != parameter.part_shape:
        # Its parts need not begin where the file's strips and blocks do.
        matrix = torch.empty(parameter.part_shape, dtype=place.dtype, device=place.device)
        _load(shards, entry, replace(parameter, place=matrix))
        place.copy_(matrix.view(place.shape))
    elif _is_read_directly(entry, parameter):
        shards.read(entry, rows.start * _row_bytes(entry), _bytes(place))
    else:
        for first, strip in _converted(shards, entry, rows, place):
            start, stop = max(first, rows.start), min(first + len(strip), rows.stop)
            place[start - rows.start : stop - rows.start].copy_(strip[(slice(start - first, stop - first), *columns)])


def _read_bytes(entry: Entry, parameter: Parameter) -> int:
    """Whole rows are read, and of these the columns that the place has."""
    return _row_bytes(entry) * parameter.part_shape[0]


def _is_read_directly(entry: Entry, parameter: Parameter) -> bool:
    place = parameter.place
    whole_rows = parameter.part_shape[1:] == entry.shape[1:]
    return place.device.type == "cpu" and place.dtype == DTYPES[entry.dtype] and place.is_contiguous() and whole_rows


def _converted(shards: Shards, entry: Entry, rows: slice, place: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Strips that hold the rows, each with its first row's index; quantized ones in the place's dtype and on its
    device, unless they stay as they are.
    """
    if DTYPES[entry.dtype] == place.dtype or not is_quantized(entry):
        yield from _strips(shards, entry, rows)
    elif is_fp8(entry):
        yield from _dequantized_blocks(shards, entry, rows, place)
    elif is_int4(entry):
        yield from _dequantized_groups(shards, entry, rows, place.device)
    else:
        yield from _dequantized_nvfp4(shards, entry, rows, place.device)


def _dequantized_blocks(
    shards: Shards, entry: Entry, rows: slice, place: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor]]:
    scale = _read(shards, scale_of(shards, entry)).to(place.device, torch.float32)
    begin = rows.start // BLOCK * BLOCK
    for first, strip in _strips(shards, entry, slice(begin, rows.stop), multiple=BLOCK):
        values = torch.empty(strip.shape, dtype=place.dtype, device=place.device)
        blocks = scale[first // BLOCK : -(-(first + len(strip)) // BLOCK)]
        dequantize_blocks(strip.to(place.device), blocks, values)
        yield first, values


def _dequantized_groups(
    shards: Shards, entry: Entry, rows: slice, device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    scale = _read(shards, scale_of(shards, entry)).to(device, torch.float32)
    name = pre_scale_name(entry.name)
    pre_scale = _read(shards, shards.entries[name]).to(device) if name in shards.entries else None
    for first, strip in _strips(shards, entry, rows):
        values = dequantize_groups(strip.to(device), scale[first : first + len(strip)])
        # The input's channels are multiplied by it, so the matrix that stands for both is too.
        yield first, values if pre_scale is None else values.mul_(pre_scale)


def _dequantized_nvfp4(
    shards: Shards, entry: Entry, rows: slice, device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    scales = _read(shards, scale_of(shards, entry)).to(device)
    global_scale = _read(shards, global_scale_of(shards, entry)).to(device).reshape(())
    for first, strip in _strips(shards, entry, rows):
        values = dequantize_nvfp4(strip.to(device), scales[first : first + len(strip)])
        yield first, values.mul_(global_scale)


def _strips(shards: Shards, entry: Entry, rows: slice, multiple: int = 1) -> Iterator[tuple[int, torch.Tensor]]:
    """The rows in strips of at most 16 MiB if `multiple` rows fit, each with its first row's index."""
    row_bytes = _row_bytes(entry)
    height = max(STAGING_BYTES // max(row_bytes, 1) // multiple, 1) * multiple
    staging = torch.empty((min(height, rows.stop - rows.start), *entry.shape[1:]), dtype=DTYPES[entry.dtype])
    for start in range(rows.start, rows.stop, height):
        strip = staging[: rows.stop - start]
        shards.read(entry, start * row_bytes, _bytes(strip))
        yield start, strip


def _row_bytes(entry: Entry) -> int:
    return entry.size_bytes // entry.shape[0]


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data.cast("B")


def _read(shards: Shards, entry: Entry) -> torch.Tensor:
    values = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    shards.read(entry, 0, _bytes(values))
    return values


def _progress(quiet: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty())
