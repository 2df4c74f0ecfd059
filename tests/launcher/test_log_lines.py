import os
import pty
from pathlib import Path

from launcher.log_lines import LinePrinter


def test_names_stand_in_a_column_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with path.open("w", encoding="utf-8") as output, LinePrinter(9, output) as printer:
        printer("scheduler", "ready")
        printer("mesh", "all up")
    assert path.read_text(encoding="utf-8") == "scheduler │ ready\nmesh      │ all up\n"


def test_a_terminal_gets_the_same_colour_for_the_same_name() -> None:
    reading, terminal = pty.openpty()
    with os.fdopen(terminal, "w", encoding="utf-8") as output, LinePrinter(4, output) as printer:
        printer("mesh", "one")
        printer("mesh", "two")
        with os.fdopen(reading, encoding="utf-8", closefd=False) as screen:
            first, second = screen.readline().rstrip(), screen.readline().rstrip()
    os.close(reading)
    assert first.startswith("\x1b[") and first.endswith("\x1b[0m │ one")
    assert first.removesuffix("one") == second.removesuffix("two")
