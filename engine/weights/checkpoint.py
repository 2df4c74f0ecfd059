"""Streams a checkpoint's tensors into preallocated parameters, one at a time."""

import re
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from engine.model.parameters import published_shape
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


def load_weights(shards: Shards, parameters: Mapping[str, torch.Tensor], unused: tuple[str, ...] = ()) -> None:
    """Fill every parameter from the tensor of its name, converting to its dtype; FP8 blocks are dequantized, unless the
    parameter is FP8 too.

    Parameters may be views (a part of a fused matrix, or several, as `NamedParameters` has them). Those on the CPU that
    are contiguous and of the file's dtype are read in place; peak memory is the parameters plus 16 MiB, and the largest
    matrix in parts. unused: prefixes of tensors that may be there and are not read. Raises CheckpointError where a
    tensor is missing, has the wrong shape, or is not expected.
    """
    _check_names(shards, parameters, unused)
    for name, parameter in parameters.items():
        _check_shape(shards.entries[name], published_shape(parameter))
        if parameter.dtype == torch.float8_e4m3fn and not _is_fp8(shards.entries[name]):
            raise CheckpointError(f"{name} is {shards.entries[name].dtype}: config.json says that weights are FP8")
    ordered = sorted((shards.entries[name] for name in parameters), key=lambda entry: (entry.path, entry.offset))
    with _progress() as progress:
        task = progress.add_task("loading weights", total=sum(entry.size_bytes for entry in ordered))
        for entry in ordered:
            _load(shards, entry, parameters[entry.name])
            progress.advance(task, entry.size_bytes)


def _check_names(shards: Shards, parameters: Mapping[str, torch.Tensor], unused: tuple[str, ...]) -> None:
    missing = [name for name in parameters if name not in shards.entries]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_some(missing)}")
    unexpected = [
        name for name in shards.entries if not name.startswith(unused) and not _is_expected(name, shards, parameters)
    ]
    if unexpected:
        raise CheckpointError(f"the checkpoint holds tensors that config.json does not describe: {_some(unexpected)}")


def _is_expected(name: str, shards: Shards, parameters: Mapping[str, torch.Tensor]) -> bool:
    weight = name.removesuffix(SCALE_SUFFIX)
    return (weight in parameters and (weight == name or _is_fp8(shards.entries[weight]))) or bool(HARMLESS.search(name))


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


def _load(shards: Shards, entry: Entry, parameter: torch.Tensor) -> None:
    if parameter.shape != entry.shape:
        # Its parts need not begin where the file's strips and blocks do.
        whole = torch.empty(entry.shape, dtype=parameter.dtype, device=parameter.device)
        _load(shards, entry, whole)
        parameter.copy_(whole.view(parameter.shape))
    elif _is_fp8(entry) and parameter.dtype != torch.float8_e4m3fn:
        scale = _read_scale(shards, entry)
        for start, rows in _strips(shards, entry, multiple=BLOCK):
            stop = start + len(rows)
            dequantize_blocks(rows, scale[start // BLOCK : -(-stop // BLOCK)], parameter[start:stop])
    elif parameter.device.type == "cpu" and parameter.dtype == DTYPES[entry.dtype] and parameter.is_contiguous():
        shards.read(entry, 0, _bytes(parameter))
    else:
        for start, rows in _strips(shards, entry, multiple=1):
            parameter[start : start + len(rows)].copy_(rows)


def _strips(shards: Shards, entry: Entry, multiple: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The tensor in strips of at most 16 MiB where `multiple` rows fit, each with its first row's index."""
    row_count = entry.shape[0]
    row_bytes = max(entry.size_bytes // row_count, 1)
    height = max(STAGING_BYTES // row_bytes // multiple, 1) * multiple
    staging = torch.empty((min(height, row_count), *entry.shape[1:]), dtype=DTYPES[entry.dtype])
    for start in range(0, row_count, height):
        rows = staging[: row_count - start]
        shards.read(entry, start * row_bytes, _bytes(rows))
        yield start, rows


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
