"""Prints the lines of several processes on one terminal, each after the name of its process."""

import sys
import zlib
from contextlib import suppress
from typing import TextIO

_COLOURS = (36, 35, 34, 32, 33, 96, 95, 94)


class LinePrinter:
    """Prints "name │ line"; names are coloured if `output` is a terminal."""

    def __init__(self, width: int, output: TextIO | None = None) -> None:
        self._width = width
        self._output = output or sys.stdout
        self._coloured = self._output.isatty()

    def __call__(self, name: str, line: str) -> None:
        label = f"{name:<{self._width}}"
        if self._coloured:
            # The colour follows from the name, so that a worker keeps it when it is restarted.
            label = f"\x1b[{_COLOURS[zlib.crc32(name.encode()) % len(_COLOURS)]}m{label}\x1b[0m"
        # `deepmesh up | head` keeps serving when nobody reads its lines any more.
        with suppress(BrokenPipeError):
            self._output.write(f"{label} │ {line}\n")
            self._output.flush()
