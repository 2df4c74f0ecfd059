"""Writes safetensors files with several threads.

The package's own `save_file` wants all tensors on the CPU and writes with one thread. Copying a layer of DeepSeek-R1's
INT4 experts there and writing it would take longer than quantizing it.
"""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from engine.weights.headers import LENGTH_BYTES
from engine.weights.strips import DTYPES

# Threads that write. Each holds one tensor in host memory at a time.
THREADS = 8
# The first byte after the header is at a multiple of this.
ALIGNMENT = 8
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """tensors: on any device, of the dtypes that the engine reads. Raises OSError."""
    # Order tensors as the safetensors package does, widest dtype first, so that each is aligned to its item size.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offsets: dict[str, int] = {}
    end = 0
    for name, tensor in ordered.items():
        offsets[name] = end
        end += tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(THREADS) as pool:

        def write(name: str) -> None:
            values = ordered[name].contiguous().flatten().view(torch.uint8).cpu()
            _write(file.fileno(), values.numpy().data.cast("B"), LENGTH_BYTES + len(text) + offsets[name])

        _write(file.fileno(), memoryview(len(text).to_bytes(LENGTH_BYTES, "little") + text), 0)
        # Listing the results raises a thread's error.
        list(pool.map(write, ordered))


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count
