"""Streams a checkpoint's tensors into preallocated parameters, while threads read the next ones."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from engine.model.parameters import Parameter, Part, whole
from engine.weights.headers import Entry
from engine.weights.reader import Piece, Reader
from engine.weights.shards import Shards
from engine.weights.stored import (
    companions,
    global_scale_of,
    is_nvfp4,
    is_packed,
    is_quantized,
    is_unused,
    matrix_shape,
    packed_parts,
    scale_of,
)
from engine.weights.strips import DTYPES, Filling, Strip, kept_form, strips_of
from mesh.errors import CheckpointError
from mesh.progress import ProgressLog

NAMES_SHOWN = 5
# Number formats that places keep as they are published.
KEPT: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float8_e4m3fn: "FP8", torch.int8: "INT4", torch.uint8: "NVFP4"}
)


def load_weights(
    reader: Reader,
    parts: Sequence[Part],
    unused: tuple[str, ...] = (),
    *,
    elsewhere: Set[str] = frozenset(),
    quiet: bool = False,
) -> None:
    """Fill every place of a part from the tensor of its name and finish the part, then go on with the next. Values are
    converted to the place's dtype; quantized weights are dequantized, unless the place has their form.

    Places lie on the reader's device and may be views (a part of a fused matrix, or several, as `Parameter` has them).
    Those on the CPU that are contiguous, of the file's dtype and filled from whole rows are read directly. Memory in
    addition to the parameters is at most: on the host nine windows of 16 MiB; on the device one of them, what it is
    converted to, and the largest matrix in parts, or several times a packed one. unused: prefixes of tensors that may
    be there and are not read; elsewhere: names of tensors that other ranks read, and that must be there; quiet: show no
    progress. Raises CheckpointError if a tensor is missing, has the wrong shape, or is not expected, before anything is
    read.
    """
    shards, parameters = reader.shards, [parameter for part in parts for parameter in part.parameters]
    _check_names(shards, {parameter.name for parameter in parameters} | elsewhere, unused)
    for parameter in parameters:
        _check(shards, shards.entries[parameter.name], parameter)
    plan = [_planned(shards, part) for part in parts]
    sizes = [[sum(strip.piece.size_bytes for strip in strips) for _, strips in planned] for planned in plan]
    total_bytes = sum(map(sum, sizes))
    logged = ProgressLog("loading weights", total_bytes)
    read = reader.read(_pieces(strips for planned in plan for _, strips in planned))
    with _progress(quiet) as progress:
        task = progress.add_task("loading weights", total=total_bytes)
        for part, planned, read_bytes in zip(parts, plan, sizes, strict=True):
            for (parameter, strips), size_bytes in zip(planned, read_bytes, strict=True):
                _fill(Filling(shards, parameter), strips, read)
                progress.advance(task, size_bytes)
                if not quiet:
                    logged.advance(size_bytes)
            part.finish()


def read_matrices(reader: Reader, names: Sequence[str]) -> Iterator[torch.Tensor]:
    """Tensors as float32, dequantized, in this order. The caller knows that they exist and that their scales fit."""
    shards = reader.shards
    # Places have no memory yet: each gets it when it is its turn.
    strips = [strips_of(shards, whole(name, _empty(shards, name, torch.device("meta")))) for name in names]
    read = reader.read(_pieces(strips))
    for name, members in zip(names, strips, strict=True):
        place = _empty(shards, name, reader.device)
        _fill(Filling(shards, whole(name, place)), members, read)
        yield place


def read_stored(shards: Shards, name: str) -> torch.Tensor:
    """One tensor as it is stored, on the CPU."""
    entry = shards.entries[name]
    values = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    shards.read(entry.path, entry.offset, values.view(torch.uint8).flatten().numpy().data.cast("B"))
    return values


def _planned(shards: Shards, part: Part) -> list[tuple[Parameter, list[Strip]]]:
    """The part's parameters and their strips, in the order in which the files have them."""

    def place_in_files(parameter: Parameter) -> tuple[str, int]:
        entry = shards.entries[parameter.name]
        return str(entry.path), entry.offset

    return [(parameter, strips_of(shards, parameter)) for parameter in sorted(part.parameters, key=place_in_files)]


def _pieces(strips: Iterable[Iterable[Strip]]) -> Iterator[Piece]:
    return (strip.piece for members in strips for strip in members)


def _fill(filling: Filling, strips: Iterable[Strip], read: Iterator[torch.Tensor]) -> None:
    for strip in strips:
        filling.take(strip, next(read))
    filling.end()


def _empty(shards: Shards, name: str, device: torch.device) -> torch.Tensor:
    return torch.empty(matrix_shape(shards.entries[name]), dtype=torch.float32, device=device)


def _check_names(shards: Shards, wanted: Set[str], unused: tuple[str, ...]) -> None:
    missing = sorted(name for name in wanted if name not in shards.entries)
    if missing:
        raise CheckpointError(f"the checkpoint lacks {some_of(missing)}")
    read = {name for weight in wanted for name in companions(shards, shards.entries[weight])} | wanted
    unexpected = [
        name for name in shards.entries if name not in read and not name.startswith(unused) and not is_unused(name)
    ]
    if unexpected:
        raise CheckpointError(f"the checkpoint holds tensors that config.json does not describe: {some_of(unexpected)}")


def some_of(names: list[str]) -> str:
    """The first names, in words."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def _check(shards: Shards, entry: Entry, parameter: Parameter) -> None:
    if parameter.place.dtype in KEPT:
        dtype, shape = kept_form(entry)
        if dtype != parameter.place.dtype:
            form = KEPT[parameter.place.dtype]
            raise CheckpointError(
                f"{entry.name} is {entry.dtype}: the checkpoint's configuration says that it is {form}"
            )
    else:
        shape = matrix_shape(entry)
    if shape != parameter.shape:
        raise CheckpointError(
            f"{entry.name} in {entry.path} has shape {list(shape)}; config.json makes it {list(parameter.shape)}"
        )
    if is_packed(entry):
        packed_parts(shards, entry)
    elif is_quantized(entry):
        scale_of(shards, entry)
    if is_nvfp4(entry):
        global_scale_of(shards, entry)


def _progress(quiet: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty())
