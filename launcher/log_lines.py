"""Prints the lines of several processes on one terminal, each after the name of its process."""

import sys
import zlib
from types import TracebackType
from typing import Self, TextIO

from mesh.observe.line_sink import LineSink

_COLOURS = (36, 35, 34, 32, 33, 96, 95, 94)
# The name of the supervisor's own lines.
NAME = "mesh"


class LinePrinter:
    """Prints "name │ line"; names are coloured if `output` is a terminal.

    Processes go on whatever happens to the output: see `LineSink`. Their last lines are printed when the block ends.
    """

    def __init__(self, width: int, output: TextIO | None = None) -> None:
        self._width = width
        output = output or sys.stdout
        self._coloured = output.isatty()
        self._sink = LineSink(output, lambda lines, why: self._labelled(NAME, f"{lines} lines are lost here: {why}"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sink.close()

    def __call__(self, name: str, line: str) -> None:
        self._sink.write(self._labelled(name, line))

    def _labelled(self, name: str, line: str) -> str:
        label = f"{name:<{self._width}}"
        if self._coloured:
            # The colour follows from the name, so that a worker keeps it when it is restarted.
            label = f"\x1b[{_COLOURS[zlib.crc32(name.encode()) % len(_COLOURS)]}m{label}\x1b[0m"
        return f"{label} │ {line}"
