import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest

from mesh.observe.line_sink import LineSink
from tests.support.waiting import eventually


@contextmanager
def sink_of(descriptor: int, encoding: str = "utf-8") -> Iterator[LineSink]:
    """A sink whose file the caller may exchange for another with dup2."""
    with os.fdopen(descriptor, "w", encoding=encoding, closefd=False) as stream, opened(stream) as sink:
        yield sink


def opened(stream: TextIO | None) -> LineSink:
    return LineSink(stream, lambda lines, why: f"{lines} lost: {why}")


def full_file() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def exchange(descriptor: int, path: Path) -> None:
    """From now on the descriptor is the file at `path`."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, descriptor)
    os.close(file)


def test_a_line_is_written_before_write_returns(tmp_path: Path) -> None:
    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    with sink_of(file) as sink:
        sink.write("one")
        assert (tmp_path / "log").read_bytes() == b"one\n"


def test_lines_that_a_full_disk_refused_are_counted_once(tmp_path: Path) -> None:
    file = full_file()
    with sink_of(file) as sink:
        sink.write("one")
        sink.write("two")
        exchange(file, tmp_path / "log")
        sink.write("three")
        sink.write("four")
    assert (tmp_path / "log").read_text() == "2 lost: no space left on device\nthree\nfour\n"


def test_a_line_after_a_torn_one_begins_a_new_line(tmp_path: Path) -> None:
    reading, file = os.pipe()
    fcntl.fcntl(file, fcntl.F_SETPIPE_SZ, 4096)
    with sink_of(file) as sink:
        # The thread has written a part when the reader leaves.
        sink.write("x" * 100_000)
        assert os.read(reading, 10) == b"x" * 10
        os.close(reading)
        sink.flush(60)
        exchange(file, tmp_path / "log")
        sink.write("after")
    assert (tmp_path / "log").read_text() == "\n1 lost: broken pipe\nafter\n"


def test_no_caller_waits_for_a_reader_and_lines_stay_ordered() -> None:
    reading, file = os.pipe()
    lines = [f"{number} {'x' * 100}" for number in range(5_000)]
    with sink_of(file) as sink:
        for line in lines:
            sink.write(line)
        with os.fdopen(reading, closefd=False) as reader:
            assert [reader.readline().rstrip("\n") for _ in lines] == lines


def test_lines_beyond_what_waits_are_lost_and_counted() -> None:
    reading, file = os.pipe()
    line = "x" * 100_000
    with sink_of(file) as sink:
        for _ in range(100):
            sink.write(line)
        with os.fdopen(reading, closefd=False) as reader:
            kept = [reader.readline().rstrip("\n") for _ in range(41)]
            sink.flush(60)
            sink.write("after")
            assert kept == [line] * 41
            assert [reader.readline(), reader.readline()] == ["59 lost: not read\n", "after\n"]


def test_a_file_made_non_blocking_elsewhere_loses_no_line() -> None:
    reading, file = os.pipe()
    os.set_blocking(file, False)
    with sink_of(file) as sink:
        sink.write("x" * 1_000_000)
        with os.fdopen(reading, closefd=False) as reader:
            assert len(reader.readline()) == 1_000_001


async def test_an_unread_or_closed_terminal_stops_no_caller() -> None:
    controlling, terminal = os.openpty()
    with sink_of(terminal) as sink:
        for _ in range(1_000):
            sink.write("x" * 100)
        os.close(controlling)
        # The thread that writes notices, and loses what waited.
        await eventually(lambda: sink.flush(0))
        sink.write("after")


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1"])
def test_characters_that_an_encoding_lacks_are_spelled(tmp_path: Path, encoding: str) -> None:
    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    with sink_of(file, encoding) as sink:
        sink.write("gateway │ \udcff")
    assert (tmp_path / "log").read_bytes() == b"gateway \\u2502 \\udcff\n"


def test_no_file_at_all_takes_every_line() -> None:
    with opened(None) as sink:
        sink.write("one")
    sink.write("after the end")
