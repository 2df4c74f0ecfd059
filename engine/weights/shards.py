"""The safetensors files of a checkpoint: what they hold, and reads that leave no mapped pages.

The safetensors package maps files into memory, and mapped pages count as resident: a model would be held twice while it
loads. Plain reads into the parameters' own memory do not.
"""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from io import FileIO
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

from engine.weights.headers import INDEX, ITEM_BYTES, Entry, language_model, read_header, shard_files, weight_map
from engine.weights.packed import AWQ, COMPRESSED, GPTQ
from mesh.errors import CheckpointError

# What belongs to matrices that are packed, and to nothing else.
PACKED_DTYPES = ("I32", "I64")


class Shards:
    """All tensors of a checkpoint by name. A context manager: it keeps its files open while it is read."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = entries
        self._files: dict[Path, FileIO] = {}
        self._stack = ExitStack()
        self._opening = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries.values())

    def read(self, path: Path, offset: int, target: memoryview) -> None:
        """Fill `target` (bytes) from byte `offset` of a file on. Several threads may read at once."""
        file = self._open(path).fileno()
        while target:
            # One read returns at most 2 GiB.
            count = os.preadv(file, [target], offset)
            if not count:
                raise CheckpointError(f"{path} ended while it was read: it changed on disk")
            target, offset = target[count:], offset + count

    def _open(self, path: Path) -> FileIO:
        with self._opening:
            if path not in self._files:
                self._files[path] = self._stack.enter_context(path.open("rb", buffering=0))
            return self._files[path]


def open_shards(model_dir: Path) -> Shards:
    """Read the index and every file's header.

    Names are those of the language model's weights. Raises CheckpointError for a missing index or shard, a truncated
    file, a tensor that its shard does not hold, a dtype that is not served, or a checkpoint without a language model.
    """
    files = weight_map(model_dir)
    entries: dict[str, Entry] = {}
    for file_name in shard_files(files):
        path = model_dir / file_name
        if not path.is_file():
            count = sum(value == file_name for value in files.values())
            raise CheckpointError(f"{path} is missing: {INDEX} places {count} tensors there; download it again")
        entries |= read_header(path)
    for name, file_name in files.items():
        if name not in entries or entries[name].path.name != file_name:
            raise CheckpointError(
                f"{model_dir / file_name} does not hold {name}, which {INDEX} places there; download both again"
            )
    entries = _with_packed(language_model(entries, model_dir))
    for entry in entries.values():
        _check_served(entry)
    return Shards(entries)


def _with_packed(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Packed matrices by the names of the weights that they stand for."""
    found = dict(entries)
    for name, entry in entries.items():
        module, _, kind = name.rpartition(".")
        if kind == COMPRESSED.weight:
            packing = COMPRESSED
        elif kind == AWQ.weight:
            packing = GPTQ if _is_gptq(entries, entry, module) else AWQ
        else:
            continue
        if entry.dtype != "I32" or len(entry.shape) != 2:
            raise CheckpointError(f"{entry.path}: {name} is {entry.dtype} {list(entry.shape)}, not a matrix of I32")
        del found[name]
        found[f"{module}.weight"] = replace(entry, name=f"{module}.weight", packing=packing)
    return found


def _is_gptq(entries: Mapping[str, Entry], entry: Entry, module: str) -> bool:
    """Whether inputs are packed and not, as by AWQ, outputs, of which each has a scale."""
    scales = entries.get(f"{module}.{GPTQ.scales}")
    numbered = any(f"{module}.{name}" in entries for name in GPTQ.unread)
    return numbered or (scales is not None and scales.shape[-1] == entry.shape[-1])


def _check_served(entry: Entry) -> None:
    kind = entry.name.rpartition(".")[2]
    belongs = entry.packing is not None or kind in (AWQ.zeros, *GPTQ.unread, *COMPRESSED.unread)
    if entry.dtype in PACKED_DTYPES and not belongs:
        served = ", ".join(name for name in ITEM_BYTES if name not in PACKED_DTYPES)
        raise CheckpointError(f"{entry.path}: {entry.name} has dtype {entry.dtype}; supported are {served}")
