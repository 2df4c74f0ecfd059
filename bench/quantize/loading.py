"""A checkpoint loaded as workers load it, and plain reads of its files."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.quantize.host_memory import host_peak
from engine.weights.loading import load_model
from engine.weights.reader import WINDOW_BYTES, Piece, Reader
from engine.weights.shards import open_shards

# A plain read ends after so long at most; by then even a slow disk's rate is known.
LONGEST_READ_SECONDS = 20.0


@dataclass(frozen=True)
class Loaded:
    """How a load went. `host_peak_bytes` excludes the parameters if they lie in host memory."""

    seconds: float
    rate: float
    host_peak_bytes: int


def shard_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def plain_rate(files: Iterable[Path]) -> float:
    """Bytes a second at which one thread reads the files, one after another, into the same memory."""
    memory = memoryview(bytearray(WINDOW_BYTES))
    read, started = 0, time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(memory):
                read += count
                if time.perf_counter() - started > LONGEST_READ_SECONDS:
                    return read / (time.perf_counter() - started)
    return read / (time.perf_counter() - started)


def reader_rate(directory: Path, device: torch.device) -> float:
    """Bytes a second at which the loader's threads bring files to the device if nothing is done with them there."""
    with open_shards(directory) as shards:
        ordered = sorted(shards.entries.values(), key=lambda entry: (str(entry.path), entry.offset))
        pieces = [
            Piece(entry.path, entry.offset + start, min(WINDOW_BYTES, entry.size_bytes - start))
            for entry in ordered
            for start in range(0, entry.size_bytes, WINDOW_BYTES)
        ]
        started = time.perf_counter()
        for _ in Reader(shards, device).read(pieces):
            pass
        _synchronize(device)
        return shards.size_bytes / (time.perf_counter() - started)


def load(directory: Path, device: torch.device) -> Loaded:
    """Load the checkpoint with its weights as they are published."""
    size = sum(path.stat().st_size for path in shard_files(directory))
    _synchronize(device)
    with host_peak() as peak:
        started = time.perf_counter()
        model = load_model(directory, torch.bfloat16, device, "quantized")
        _synchronize(device)
        seconds = time.perf_counter() - started
    on_host = sum(each.place.nbytes for each in model.parameters() if each.place.device.type == "cpu")
    return Loaded(seconds, size / seconds, max(peak.peak_bytes - on_host, 0))


def evict(files: Iterable[Path]) -> None:
    """Drop the files from the page cache, as far as the file system allows."""
    for path in files:
        file = os.open(path, os.O_RDONLY)
        try:
            # Pages that are not written to disk yet would stay in the cache.
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
