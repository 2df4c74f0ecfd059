"""Prints model output on a terminal: exactly its text, with reasoning dimmed."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from cli.answers import Show

# A model must not control the terminal: control characters, including those with eight bits, are shown as symbols.
VISIBLE: dict[int, int | str] = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: "␡",
    **dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}"),
}


def make_console() -> Console:
    """A console that changes nothing of what it prints: no emoji for ":smile:", no colours for numbers."""
    return Console(highlight=False, soft_wrap=True, emoji=False)


def show_on(console: Console) -> Show:
    """A function that prints one answer as it streams. Its text starts on a new line after the reasoning."""
    thought = False

    def show(text: str, reasoning: bool) -> None:
        nonlocal thought
        if not text:
            return
        if thought and not reasoning:
            console.print()
        thought = reasoning
        console.print(text.translate(VISIBLE), end="", style="dim" if reasoning else None, markup=False)

    return show


@contextmanager
def until_first_text(console: Console, show: Show) -> Iterator[Show]:
    """`show`, with a sign of waiting on a terminal until the first text, or the end of the block."""
    if not console.is_terminal:
        yield show
        return
    waiting = console.status("waiting for the first token", spinner="dots")

    def show_first(text: str, reasoning: bool) -> None:
        if text:
            waiting.stop()
        show(text, reasoning)

    with waiting:
        yield show_first
