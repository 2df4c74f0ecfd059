"""Splits a reasoning model's answer at <think> and </think> while it streams."""

from enum import Enum

from gateway.text.signs import NO_SIGNS, Signs
from gateway.tool_formats.scanning import Markers

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


class ReasoningStart(Enum):
    """Whether an answer can begin with reasoning."""

    # No: raw completions are content alone.
    NONE = "none"
    # The model may open a <think> block.
    POSSIBLE = "possible"
    # The prompt ended inside a block, because the chat template opened it.
    OPEN = "open"


class ReasoningSplitter:
    """Sorts text into reasoning and content.

    Only one block, at the very start of the answer, is reasoning; the tags, and line breaks right after each, belong
    to neither part. Holds back what may turn out to be a tag.
    """

    def __init__(self, start: ReasoningStart, signs: Signs = NO_SIGNS, interrupt: str | None = None) -> None:
        """signs: where the tags are tokens, the letters of a tag are only letters. interrupt: signed text that ends a
        block too, and belongs to the content.
        """
        self._opening, self._closing = signs.of(THINK_OPEN), signs.of(THINK_CLOSE)
        self._ends = Markers([self._closing, *([] if interrupt is None else [interrupt])])
        self._awaiting_open = start is ReasoningStart.POSSIBLE
        self._thinking = start is ReasoningStart.OPEN
        self._at_line_start = start is ReasoningStart.OPEN
        self._held = ""

    @property
    def settled(self) -> bool:
        """Whether all text that follows is content, unchanged."""
        return not (self._awaiting_open or self._thinking or self._at_line_start)

    @property
    def begun(self) -> bool:
        """Whether the answer's first text that is not white space has come."""
        return not self._awaiting_open

    @property
    def thinking(self) -> bool:
        return self._thinking

    def push(self, text: str) -> tuple[str, str]:
        """(content, reasoning) of the text so far that no later text can change."""
        text = self._held + text
        self._held = ""
        if self._awaiting_open:
            text = self._open(text)
        reasoning = ""
        if self._thinking:
            reasoning, text = self._think(text)
        return self._without_line_breaks(text), reasoning

    def finish(self) -> tuple[str, str]:
        """(content, reasoning) that was held back, now that no tag can follow."""
        held, self._held = self._held, ""
        return ("", held) if self._thinking else (held, "")

    def _open(self, text: str) -> str:
        """Decide whether a block opens; `text` is held back while that is undecided."""
        stripped = text.lstrip()
        if stripped.startswith(self._opening):
            self._awaiting_open, self._thinking, self._at_line_start = False, True, True
            return stripped[len(self._opening) :]
        if self._opening.startswith(stripped):
            self._held = text
            return ""
        self._awaiting_open = False
        return text

    def _think(self, text: str) -> tuple[str, str]:
        """(reasoning, the text after the block)."""
        found = self._ends.first(text)
        if found is None:
            keep = self._ends.begun(text)
            self._held = text[len(text) - keep :]
            return self._without_line_breaks(text[: len(text) - keep]), ""
        place, marker = found
        reasoning = self._without_line_breaks(text[:place])
        self._thinking, self._at_line_start = False, marker == self._closing
        return reasoning, text[place:].removeprefix(self._closing)

    def _without_line_breaks(self, text: str) -> str:
        if self._at_line_start and text:
            text = text.lstrip("\n")
            self._at_line_start = not text
        return text
