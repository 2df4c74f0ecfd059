"""Finds tool calls in an answer while it streams."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from gateway.tool_format import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    FENCE_CLOSE,
    FENCE_OPEN,
    SEPARATOR,
    CallForm,
)
from gateway.tools import ToolCallDelta

# A real name is much shorter; if a header does not end within this length, it is no call.
MAX_HEADER_CHARACTERS = 1024


@dataclass(slots=True)
class Parsed:
    """The content and calls found in some text."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class _State(Enum):
    # Before the first call.
    CONTENT = auto()
    # Before the next call, or the end of them all.
    BETWEEN = auto()
    # From the call's first marker to its arguments.
    HEADER = auto()
    ARGUMENTS = auto()
    # After the arguments, before the call's last marker.
    TAIL = auto()
    # After the last call; models write nothing there.
    AFTER = auto()


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ToolCallParser:
    """Splits an answer into content and calls; the result does not depend on how the text was split.

    Holds back only what may turn out to be a marker. Text after the calls is dropped.
    """

    def __init__(self, form: CallForm, parallel: bool = True, new_id: Callable[[], str] = new_call_id) -> None:
        """parallel: whether to report calls after the first."""
        self.calls = 0
        self._form = form
        self._parallel = parallel
        self._new_id = new_id
        self._state = _State.CONTENT
        self._held = ""
        self._steps: dict[_State, Callable[[str, Parsed], str | None]] = {
            _State.CONTENT: self._content,
            _State.BETWEEN: self._between,
            _State.HEADER: self._header,
            _State.ARGUMENTS: self._arguments,
            _State.TAIL: self._tail,
        }

    def push(self, text: str) -> Parsed:
        """Content and calls that are certain so far."""
        parsed = Parsed()
        rest: str | None = self._held + text
        self._held = ""
        while rest is not None and self._state is not _State.AFTER:
            # Each step returns the text after what it used, or None if it needs more text; it has then held back the
            # rest.
            rest = self._steps[self._state](rest, parsed)
        return parsed

    def finish(self) -> Parsed:
        """The text that was held back, now that no marker can follow."""
        held, self._held = self._held, ""
        if self._state is _State.CONTENT:
            return Parsed(held)
        if self._state is _State.ARGUMENTS:
            return Parsed(calls=self._more(held))
        return Parsed()

    def _content(self, text: str, parsed: Parsed) -> str | None:
        found = _first(text, (CALLS_BEGIN, CALL_BEGIN))
        if found is None:
            parsed.content += self._without_start(text, (CALLS_BEGIN, CALL_BEGIN))
            return None
        place, marker = found
        parsed.content += text[:place]
        self._state = _State.BETWEEN if marker == CALLS_BEGIN else _State.HEADER
        return text[place + len(marker) :]

    def _between(self, text: str, parsed: Parsed) -> str | None:
        found = _first(text, (CALL_BEGIN, CALLS_END))
        if found is None:
            self._without_start(text, (CALL_BEGIN, CALLS_END))
            return None
        place, marker = found
        more = marker == CALL_BEGIN and (self._parallel or self.calls == 0)
        self._state = _State.HEADER if more else _State.AFTER
        return text[place + len(marker) :]

    def _header(self, text: str, parsed: Parsed) -> str | None:
        head, separator, rest = text.partition(SEPARATOR)
        name = head
        if separator and self._form is CallForm.FENCED:
            head, separator, rest = rest.partition(FENCE_OPEN)
            name = head
        if not separator:
            self._held = text
            if len(text) > MAX_HEADER_CHARACTERS:
                self._state = _State.AFTER
            return None
        parsed.calls.append(ToolCallDelta(self.calls, id=self._new_id(), name=name.strip()))
        self.calls += 1
        self._state = _State.ARGUMENTS
        return rest

    def _arguments(self, text: str, parsed: Parsed) -> str | None:
        ends = (FENCE_CLOSE, CALL_END) if self._form is CallForm.FENCED else (CALL_END,)
        found = _first(text, ends)
        if found is None:
            parsed.calls += self._more(self._without_start(text, ends))
            return None
        place, marker = found
        parsed.calls += self._more(text[:place])
        self._state = _State.BETWEEN if marker == CALL_END else _State.TAIL
        return text[place + len(marker) :]

    def _tail(self, text: str, parsed: Parsed) -> str | None:
        _, marker, rest = text.partition(CALL_END)
        if not marker:
            self._without_start(text, (CALL_END,))
            return None
        self._state = _State.BETWEEN
        return rest

    def _more(self, arguments: str) -> list[ToolCallDelta]:
        return [ToolCallDelta(self.calls - 1, arguments)] if arguments else []

    def _without_start(self, text: str, markers: tuple[str, ...]) -> str:
        """The text without a suffix that may begin a marker; that suffix is held back."""
        keep = max(_overlap(text, marker) for marker in markers)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


@dataclass(frozen=True, slots=True)
class ToolReading:
    """How the calls of one answer are to be read."""

    form: CallForm
    parallel: bool
    # The beginning of the answer that the prompt contains already.
    opening: str

    def parser(self) -> ToolCallParser:
        return ToolCallParser(self.form, self.parallel)


def _first(text: str, markers: tuple[str, ...]) -> tuple[int, str] | None:
    """Position of the first marker in the text, and the marker."""
    found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    return min(found, default=None)


def _overlap(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)
