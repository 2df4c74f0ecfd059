import io

from launcher.log_lines import LinePrinter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_names_stand_in_a_column_of_their_own() -> None:
    output = io.StringIO()
    printer = LinePrinter(9, output)
    printer("scheduler", "ready")
    printer("mesh", "all up")
    assert output.getvalue() == "scheduler │ ready\nmesh      │ all up\n"


def test_a_terminal_gets_the_same_colour_for_the_same_name() -> None:
    output = Terminal()
    printer = LinePrinter(4, output)
    printer("mesh", "one")
    printer("mesh", "two")
    first, second = output.getvalue().splitlines()
    assert first.startswith("\x1b[") and first.endswith("\x1b[0m │ one")
    assert first.removesuffix("one") == second.removesuffix("two")
