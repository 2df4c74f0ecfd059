"""From the bytes of published tensors to places in memory, a strip of rows at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from engine.model.parameters import Parameter
from engine.weights.headers import Entry
from engine.weights.reader import WINDOW_BYTES, Piece
from engine.weights.shards import Shards
from engine.weights.stored import (
    global_scale_of,
    is_fp8,
    is_int4,
    is_packed,
    is_quantized,
    matrix_shape,
    packed_parts,
    pre_scale_name,
    scale_of,
)
from kernels.block_quant import BLOCK, dequantize_blocks
from kernels.group_quant import dequantize_groups
from kernels.nvfp4_quant import dequantize_nvfp4

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I8": torch.int8,
        "U8": torch.uint8,
        "I32": torch.int32,
        "I64": torch.int64,
    }
)


@dataclass(frozen=True, slots=True)
class Strip:
    """Rows of the tensor that is placed, or of a tensor of scales by which it is dequantized."""

    entry: Entry
    first: int
    piece: Piece

    def tensor(self, raw: torch.Tensor) -> torch.Tensor:
        """raw: the piece's bytes. Returns [rows, ...], perhaps in the same memory."""
        dtype = DTYPES[self.entry.dtype]
        if raw.storage_offset() % dtype.itemsize:
            # A file's header is of any length, so its tensors may lie unaligned.
            raw = raw.clone()
        return raw.view(dtype).view(-1, *self.entry.shape[1:])


def strips_of(shards: Shards, parameter: Parameter) -> list[Strip]:
    """What has to be read for a place, in order: first scales, if quantized weights are dequantized on the way."""
    entry, rows = shards.entries[parameter.name], parameter.slices[0]
    if _is_read_directly(entry, parameter):
        return list(_cut(entry, rows, target=parameter.place.view(torch.uint8).flatten()))
    if not _is_dequantized(entry, parameter.place):
        return list(_cut(entry, rows))
    scales = [strip for each in _scales(shards, entry) for strip in _cut(each, slice(0, each.shape[0]))]
    if is_packed(entry):
        # In some layouts neither rows nor columns are those of the matrix: it is dequantized whole.
        return [*scales, *_cut(entry, slice(0, entry.shape[0]))]
    if not is_fp8(entry):
        return [*scales, *_cut(entry, rows)]
    # A scale is for a block of rows, so strips begin and end with blocks.
    return [*scales, *_cut(entry, slice(rows.start // BLOCK * BLOCK, rows.stop), multiple=BLOCK)]


def kept_form(entry: Entry) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and shape of a place that keeps a tensor without another rounding."""
    if entry.packing is None or not entry.packing.is_kept:
        return DTYPES[entry.dtype], entry.shape
    outputs, inputs = matrix_shape(entry)
    return torch.int8, (outputs, inputs // 2)


class Filling:
    """A place whose strips arrive in order."""

    def __init__(self, shards: Shards, parameter: Parameter) -> None:
        self._entry = shards.entries[parameter.name]
        self._parameter = parameter
        place = parameter.place
        self._dequantized = _is_dequantized(self._entry, place)
        # Where a place lies in parts, these need not begin where the file's strips and blocks do.
        in_parts = place.shape != parameter.part_shape
        self._matrix = torch.empty(parameter.part_shape, dtype=place.dtype, device=place.device) if in_parts else place
        # Parts of scales that have arrived, by name; of a packed matrix its own parts too.
        self._scales: dict[str, list[torch.Tensor]] = {}

    def take(self, strip: Strip, raw: torch.Tensor) -> None:
        """raw: its bytes, on the place's device, or in the place if they are read directly."""
        if strip.piece.target is not None:
            return
        values = strip.tensor(raw)
        packing = self._entry.packing
        if strip.entry is not self._entry or (packing is not None and self._dequantized):
            self._scales.setdefault(strip.entry.name, []).append(values.clone())
            return
        if packing is not None:
            values = packing.int4(values)
        elif self._dequantized:
            values = self._dequantize(strip.first, values)
        rows, *columns = self._parameter.slices
        start, stop = max(strip.first, rows.start), min(strip.first + len(values), rows.stop)
        part = values[(slice(start - strip.first, stop - strip.first), *columns)]
        self._matrix[start - rows.start : stop - rows.start].copy_(part)

    def end(self) -> None:
        """All strips have arrived."""
        if self._entry.packing is not None and self._dequantized:
            scales, *zeros, packed = (torch.cat(parts) for parts in self._scales.values())
            values = self._entry.packing.dequantize(packed, scales, zeros[0] if zeros else None)
            self._matrix.copy_(values[self._parameter.slices])
        if self._matrix is not self._parameter.place:
            self._parameter.place.copy_(self._matrix.view(self._parameter.place.shape))

    def _dequantize(self, first: int, values: torch.Tensor) -> torch.Tensor:
        scale, *others = (torch.cat(parts) for parts in self._scales.values())
        rows = slice(first, first + len(values))
        if is_fp8(self._entry):
            found = torch.empty(values.shape, dtype=self._matrix.dtype, device=values.device)
            dequantize_blocks(values, scale[first // BLOCK : -(-rows.stop // BLOCK)].float(), found)
            return found
        if is_int4(self._entry):
            found = dequantize_groups(values, scale[rows].float())
        else:
            found = dequantize_nvfp4(values, scale[rows])
        # AWQ's scale of the input's channels, so that the matrix stands for both; or NVFP4's scale of the whole matrix.
        return found.mul_(others[0]) if others else found


def _scales(shards: Shards, entry: Entry) -> Sequence[Entry]:
    """The scales by which a quantized tensor is dequantized: those of blocks or groups, then others."""
    if is_packed(entry):
        return packed_parts(shards, entry)
    if is_fp8(entry):
        return [scale_of(shards, entry)]
    if is_int4(entry):
        pre_scale = shards.entries.get(pre_scale_name(entry.name))
        return [scale_of(shards, entry), *([] if pre_scale is None else [pre_scale])]
    return [scale_of(shards, entry), global_scale_of(shards, entry)]


def _is_dequantized(entry: Entry, place: torch.Tensor) -> bool:
    return is_quantized(entry) and kept_form(entry)[0] != place.dtype


def _is_read_directly(entry: Entry, parameter: Parameter) -> bool:
    place = parameter.place
    whole_rows = parameter.part_shape[1:] == entry.shape[1:]
    in_place = place.device.type == "cpu" and place.dtype == DTYPES[entry.dtype] and place.is_contiguous()
    return in_place and whole_rows and place.shape == parameter.part_shape


def _cut(entry: Entry, rows: slice, multiple: int = 1, target: torch.Tensor | None = None) -> list[Strip]:
    """The rows in strips of at most a window's bytes if `multiple` rows fit. target: memory of all of them."""
    row_bytes = entry.size_bytes // entry.shape[0]
    height = max(WINDOW_BYTES // max(row_bytes, 1) // multiple, 1) * multiple
    strips = []
    for start in range(rows.start, rows.stop, height):
        first, size = (start - rows.start) * row_bytes, (min(start + height, rows.stop) - start) * row_bytes
        part = None if target is None else target[first : first + size]
        strips.append(Strip(entry, start, Piece(entry.path, entry.offset + start * row_bytes, size, part)))
    return strips
