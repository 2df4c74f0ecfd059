"""Tables, printed on a terminal and written as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table


@dataclass
class Sheet:
    """Rows of text under headings. Every column but the first is right-aligned."""

    headings: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        assert len(cells) == len(self.headings)
        self.rows.append(cells)

    def markdown(self) -> str:
        """A table of GitHub's Markdown, columns aligned in the source too."""
        widths = [max(map(len, column)) for column in zip(self.headings, *self.rows, strict=True)]
        rule = [f"{'-' * widths[0]}", *(f"{'-' * (width - 1)}:" for width in widths[1:])]
        return "\n".join(_line(cells, widths) for cells in (self.headings, rule, *self.rows)) + "\n"

    def terminal(self, title: str) -> Table:
        table = Table(title=title, title_justify="left")
        for index, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if index else "left", no_wrap=not index)
        for row in self.rows:
            table.add_row(*row)
        return table


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.rjust(width) if index else cell.ljust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return f"| {' | '.join([first, *others])} |"


def percent(share: float) -> str:
    return f"{share:.1%}"


def span(low: float, high: float) -> str:
    """An interval of shares as text in percent."""
    return f"{low * 100:.0f}-{high * 100:.0f}%"


def probability(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else "<0.001"
