"""Streams a checkpoint's tensors into preallocated parameters, one at a time."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from engine.model.parameters import Parameter
from engine.weights.shards import Entry, Shards
from kernels.block_quant import BLOCK, dequantize_blocks
from mesh.errors import CheckpointError

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn}
)
SCALE_SUFFIX = "_scale_inv"
# Buffers that older tools saved and that the configuration determines.
HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$")
STAGING_BYTES = 16 << 20
NAMES_SHOWN = 5


def load_weights(shards: Shards, parameters: Sequence[Parameter], unused: tuple[str, ...] = ()) -> None:
    """Fill every place from the tensor of its name, converting to its dtype; FP8 blocks are dequantized, unless the
    place is FP8 too.

    Places may be views (a part of a fused matrix, or several, as `Parameter` has them). Those on the CPU that are
    contiguous, of the file's dtype and filled from whole rows are read directly; peak memory is the parameters, a strip
    of 16 MiB and what it is converted to, and the largest matrix in parts. unused: prefixes of tensors that may be
    there and are not read. Raises CheckpointError where a tensor is missing, has the wrong shape, or is not expected.
    """
    _check_names(shards, {parameter.name for parameter in parameters}, unused)
    for parameter in parameters:
        entry = shards.entries[parameter.name]
        _check_shape(entry, parameter.shape)
        if parameter.place.dtype == torch.float8_e4m3fn and not _is_fp8(entry):
            raise CheckpointError(f"{entry.name} is {entry.dtype}: config.json says that weights are FP8")
    ordered = sorted(parameters, key=lambda each: (shards.entries[each.name].path, shards.entries[each.name].offset))
    with _progress() as progress:
        task = progress.add_task("loading weights", total=sum(shards.entries[each.name].size_bytes for each in ordered))
        for parameter in ordered:
            entry = shards.entries[parameter.name]
            _load(shards, entry, parameter)
            progress.advance(task, entry.size_bytes)


def _check_names(shards: Shards, wanted: Set[str], unused: tuple[str, ...]) -> None:
    missing = sorted(name for name in wanted if name not in shards.entries)
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_some(missing)}")
    unexpected = [
        name for name in shards.entries if not name.startswith(unused) and not _is_expected(name, shards, wanted)
    ]
    if unexpected:
        raise CheckpointError(f"the checkpoint holds tensors that config.json does not describe: {_some(unexpected)}")


def _is_expected(name: str, shards: Shards, wanted: Set[str]) -> bool:
    weight = name.removesuffix(SCALE_SUFFIX)
    return (weight in wanted and (weight == name or _is_fp8(shards.entries[weight]))) or bool(HARMLESS.search(name))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def _check_shape(entry: Entry, expected: tuple[int, ...]) -> None:
    if entry.shape != expected:
        raise CheckpointError(
            f"{entry.name} in {entry.path} has shape {list(entry.shape)}; config.json makes it {list(expected)}"
        )


def _is_fp8(entry: Entry) -> bool:
    return entry.dtype == "F8_E4M3"


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
        for first, strip in _converted(shards, entry, rows, place.dtype):
            start, stop = max(first, rows.start), min(first + len(strip), rows.stop)
            place[start - rows.start : stop - rows.start].copy_(strip[(slice(start - first, stop - first), *columns)])


def _is_read_directly(entry: Entry, parameter: Parameter) -> bool:
    place = parameter.place
    whole_rows = parameter.part_shape[1:] == entry.shape[1:]
    return place.device.type == "cpu" and place.dtype == DTYPES[entry.dtype] and place.is_contiguous() and whole_rows


def _converted(shards: Shards, entry: Entry, rows: slice, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """Strips that hold the rows, each with its first row's index; FP8 blocks as `dtype`, unless that is FP8."""
    if not _is_fp8(entry) or dtype == torch.float8_e4m3fn:
        yield from _strips(shards, entry, rows)
        return
    scale = _read_scale(shards, entry)
    begin = rows.start // BLOCK * BLOCK
    for first, strip in _strips(shards, entry, slice(begin, rows.stop), multiple=BLOCK):
        values = torch.empty(strip.shape, dtype=dtype)
        blocks = slice(first // BLOCK, -(-(first + len(strip)) // BLOCK))
        dequantize_blocks(strip, scale[blocks], values)
        yield first, values


def _strips(shards: Shards, entry: Entry, rows: slice, multiple: int = 1) -> Iterator[tuple[int, torch.Tensor]]:
    """The rows in strips of at most 16 MiB where `multiple` rows fit, each with its first row's index."""
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


def _read_scale(shards: Shards, entry: Entry) -> torch.Tensor:
    scale = shards.entries.get(entry.name + SCALE_SUFFIX)
    if scale is None:
        raise CheckpointError(f"{entry.name} is FP8 but the checkpoint lacks {entry.name}{SCALE_SUFFIX}")
    _check_shape(scale, tuple(-(-size // BLOCK) for size in entry.shape))
    values = torch.empty(scale.shape, dtype=DTYPES[scale.dtype])
    shards.read(scale, 0, _bytes(values))
    return values.float()


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
