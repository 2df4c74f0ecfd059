"""Bytes of files that threads read ahead."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.offload.host_pages import HostPages
from engine.weights import reader as module
from engine.weights.reader import Piece, Reader
from engine.weights.shards import Shards
from mesh.errors import CheckpointError

CPU = torch.device("cpu")
SIZE = 10_000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture
def reader() -> Iterator[Reader]:
    with Shards({}) as shards:
        yield Reader(shards, CPU)


def contents(reader: Reader, pieces: list[Piece]) -> list[bytes]:
    return [raw.numpy().tobytes() for raw in reader.read(pieces)]


@pytest.mark.parametrize("window_bytes", [1, 700, 1 << 20])
def test_pieces_come_in_order_whichever_are_read_together(
    file: Path, reader: Reader, window_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WINDOW_BYTES", window_bytes)
    monkeypatch.setattr(module, "GAP_BYTES", 8)
    ranges = [(0, 1), (1, 256), (260, 300), (9000, 9001), (300, 900), (305, 310), (905, SIZE), (0, 5)]
    found = contents(reader, [Piece(file, start, stop - start) for start, stop in ranges])
    assert found == [file.read_bytes()[start:stop] for start, stop in ranges]


def test_targets_are_filled_where_they_lie(file: Path, reader: Reader) -> None:
    memory = torch.zeros(200, dtype=torch.uint8)
    pieces = [Piece(file, 0, 100), Piece(file, 100, 150, memory[:150]), Piece(file, 250, 50, memory[150:])]
    assert contents(reader, pieces) == [file.read_bytes()[piece.offset : piece.end] for piece in pieces]
    assert memory.numpy().tobytes() == file.read_bytes()[100:300]


def test_memory_is_a_window_more_than_there_are_threads(
    file: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def counted(size_bytes: int, *, page_locked: bool) -> HostPages:
        made.append(size_bytes)
        return HostPages(size_bytes, page_locked=page_locked)

    monkeypatch.setattr(module, "HostPages", counted)
    monkeypatch.setattr(module, "WINDOW_BYTES", 100)
    for _ in range(3):
        contents(reader, [Piece(file, start, 100) for start in range(0, SIZE, 100)])
        # Stop reading early: the rest is never read.
        next(reader.read([Piece(file, start, 100) for start in range(0, SIZE, 100)]))
    assert made == [100] * (min(module.MOST_THREADS, os.cpu_count() or 1) + 1)


def test_a_file_that_has_become_shorter_is_an_error(file: Path, reader: Reader) -> None:
    pieces = [Piece(file, 0, 100), Piece(file, SIZE - 10, 11)]
    with pytest.raises(CheckpointError, match="file ended while it was read: it changed on disk"):
        contents(reader, pieces)
