"""Prints model output on a terminal: exactly its text, with reasoning dimmed."""

from rich.console import Console

from cli.answers import Show


def make_console() -> Console:
    """A console that adds nothing of its own to what it prints: no emoji for ":smile:", no colours for numbers."""
    return Console(highlight=False, soft_wrap=True, emoji=False)


def show_on(console: Console) -> Show:
    """Prints one answer as it streams; its text begins on a line of its own after reasoning."""
    thought = False

    def show(text: str, reasoning: bool) -> None:
        nonlocal thought
        if not text:
            return
        if thought and not reasoning:
            console.print()
        thought = reasoning
        # A model must not steer the terminal.
        visible = text.replace("\x1b", "␛")
        console.print(visible, end="", style="dim" if reasoning else None, markup=False)

    return show
