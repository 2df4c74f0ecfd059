"""Where the tensors of a checkpoint lie, by its index and the headers of its safetensors files.

Nothing here needs torch, so that files are checked before any process starts.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from engine.model.json_reader import read_json
from mesh.errors import CheckpointError

if TYPE_CHECKING:
    from engine.weights.packed import Packing

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}
)
LENGTH_BYTES = 8
# Bytes of a file's name, which no system allows more of.
MOST_NAME_BYTES = 255
# A model that sees has its language model under this prefix, and what sees under these.
LANGUAGE_MODEL = "language_model."
VISION = ("vision_tower.", "mm_projector.")


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies: `offset` from the start of the file, row-major little-endian."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    # The layout of a matrix in INT4 packed by another tool: its name is then that of the weight that it stands for.
    packing: "Packing | None" = None


def weight_map(model_dir: Path) -> dict[str, str]:
    """Tensor name to file name; empty if one file holds everything. Raises CheckpointError if there is none."""
    path = model_dir / INDEX
    if not path.exists():
        if (model_dir / SINGLE).exists():
            return {}
        if not model_dir.is_dir():
            raise CheckpointError(f"there is no directory {model_dir}")
        raise CheckpointError(f"{model_dir} has neither {INDEX} nor {SINGLE}: it holds no weights")
    found = read_json(path).get("weight_map")
    if not isinstance(found, dict) or not found or not all(map(_is_name, found.values())):
        raise CheckpointError(f"{path} has no weight_map from tensors to files")
    return found


def _is_name(name: object) -> bool:
    """Whether this can name a file of the checkpoint's own directory."""
    # Printable: neither zero bytes nor halves of characters, which no system takes.
    if not isinstance(name, str) or not name.isprintable() or Path(name).name != name:
        return False
    return 0 < len(name.encode()) <= MOST_NAME_BYTES


def shard_files(files: Mapping[str, str]) -> list[str]:
    """The names of the files that have the weights. files: the checkpoint's `weight_map`."""
    return sorted(set(files.values())) or [SINGLE]


def read_header(path: Path) -> dict[str, Entry]:
    """What one file holds, by name. Raises CheckpointError for a truncated file or a dtype that is not served."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(LENGTH_BYTES)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == LENGTH_BYTES else size
        if LENGTH_BYTES + length > size:
            raise CheckpointError(f"{path} is truncated: its {size} bytes end within the header; download it again")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a safetensors file: its header is no JSON object")
    data = LENGTH_BYTES + length
    entries = {name: _entry(name, path, data, fields) for name, fields in header.items() if name != "__metadata__"}
    expected = max((entry.offset + entry.size_bytes for entry in entries.values()), default=data)
    if expected > size:
        raise CheckpointError(f"{path} is truncated: {size} bytes of {expected}; download it again")
    return entries


def _entry(name: str, path: Path, data: int, fields: dict[str, Any]) -> Entry:
    try:
        dtype, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        well_placed = isinstance(dtype, str) and all(type(each) is int and each >= 0 for each in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        well_placed = False
    if not well_placed:
        raise CheckpointError(f"{path} is not a safetensors file: its header does not say where {name} lies")
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{path}: {name} has dtype {dtype}; supported are {', '.join(ITEM_BYTES)}")
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise CheckpointError(f"{path}: {name} has {end - begin} bytes, which do not fit {dtype} {list(shape)}")
    # Tools differ in whether a lone number has a dimension.
    return Entry(name, path, dtype, shape or (1,), offset=data + begin, size_bytes=end - begin)


def language_model(entries: dict[str, Entry], model_dir: Path) -> dict[str, Entry]:
    """The tensors of the language model by its own names, if they are those of a model that sees; else all.

    Raises CheckpointError if only what sees is there.
    """
    if not any(name.startswith((LANGUAGE_MODEL, *VISION)) for name in entries):
        return entries
    texts = {name.removeprefix(LANGUAGE_MODEL): each for name, each in entries.items() if not name.startswith(VISION)}
    if not texts:
        raise CheckpointError(f"{model_dir} holds a vision tower and no language model: only text is served")
    return {name: replace(each, name=name) for name, each in texts.items()}
