"""Finds tool calls between markers in an answer while it streams; formats say how a call begins."""

import re
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from gateway.text.signs import Signs
from gateway.tool_formats.interface import CallReader, Parsed
from gateway.tool_formats.scanning import JsonPlace, Markers
from gateway.tools import ToolCallDelta

# A real name is much shorter; if a header does not end within this length, it is no call.
MAX_HEADER_CHARACTERS = 1024
# The end of arguments, which may be that of their code block.
_FENCE_END = re.compile(r"\s{0,16}(```\s{0,16}|`{0,2})\Z")
MAX_FENCE_CHARACTERS = 16 + 3 + 16


class _State(Enum):
    # Where text is content.
    OUTSIDE = auto()
    # From a call's first marker to its arguments.
    HEADER = auto()
    ARGUMENTS = auto()


class CallMarkers(NamedTuple):
    """Around all calls, around each, and between a call's head and the rest of it."""

    begin: str
    end: str
    call_begin: str
    call_end: str
    separator: str


@dataclass(frozen=True, slots=True)
class Head:
    """What a call begins with."""

    name: str
    # Position of its arguments.
    arguments: int
    # Whether the arguments are in a code block.
    fenced: bool = False
    # The call's id, if the model gives it one.
    id: str | None = None


class MarkedReader(CallReader):
    def __init__(self, markers: CallMarkers, signs: Signs, parallel: bool, new_id: Callable[[], str]) -> None:
        """parallel: whether to report calls after the first."""
        self.calls = 0
        self._parallel = parallel
        self._new_id = new_id
        self._begin, self._end, self._call_begin, self._call_end, separator = map(signs.of, markers)
        self._separator = separator
        self._outer = Markers((self._begin, self._call_begin, self._end))
        self._inner = Markers((self._begin, self._call_begin, self._end, self._call_end))
        self._all = Markers((self._begin, self._call_begin, self._end, self._call_end, separator))
        self._state = _State.OUTSIDE
        # Text that is not decided yet.
        self._held = ""
        # Markers before it, and white space next to them: content unless a call follows.
        self._pending = ""
        # Text at the beginning of `_held` that is the prompt's.
        self._prompted = ""
        # Whether the markers around all calls are open, and whether the last thing read was a call.
        self._open = self._after_call = False
        self._ids = set[str]()
        # The call under way: whether its arguments are in a code block, and whether it is reported.
        self._fenced, self._reported = False, True
        self._place = JsonPlace()
        self._steps: dict[_State, Callable[[str, Parsed], str | None]] = {
            _State.OUTSIDE: self._outside,
            _State.HEADER: self._header,
            _State.ARGUMENTS: self._arguments,
        }

    def begin(self, opening: str) -> Parsed:
        parsed = self.push(opening)
        self._open |= bool(opening)
        self._pending, self._prompted = "", self._held
        return parsed

    def push(self, text: str) -> Parsed:
        parsed = Parsed()
        rest: str | None = self._held + text
        self._held = ""
        while rest is not None:
            # Each step returns the text after what it used, or None if it needs more text; it has then held back the
            # rest.
            rest = self._steps[self._state](rest, parsed)
        return parsed

    def finish(self) -> Parsed:
        parsed = Parsed()
        held, self._held = self._held, ""
        if self._state is not _State.ARGUMENTS:
            self._say(held, parsed)
        elif not (self._fenced and held.strip() == "```"):
            self._argue(held, parsed)
        return parsed

    def _outside(self, text: str, parsed: Parsed) -> str | None:
        found = self._outer.first(text)
        if found is None:
            begun = self._outer.begun(text)
            self._held = text[len(text) - begun :]
            self._between(text[: len(text) - begun], parsed)
            return None
        place, marker = found
        self._between(text[:place], parsed)
        if marker == self._end:
            self._close(parsed)
        else:
            if marker == self._begin and self._begin in self._pending:
                self._say("", parsed)
            self._pending += marker
            self._state = _State.OUTSIDE if marker == self._begin else _State.HEADER
        return text[place + len(marker) :]

    def _between(self, text: str, parsed: Parsed) -> None:
        """Text outside of calls: content, unless it is white space next to a marker."""
        if text.isspace() and (self._pending or self._after_call) and len(self._pending) < MAX_HEADER_CHARACTERS:
            self._pending += text
        elif text:
            self._say(text, parsed)

    def _close(self, parsed: Parsed) -> None:
        """The marker that ends all calls. Where none are open it is content."""
        if not self._open:
            self._say(self._end, parsed)
            return
        if self._begin in self._pending:
            self._say("", parsed)
        self._open, self._after_call, self._pending = False, True, ""

    def _say(self, text: str, parsed: Parsed) -> None:
        """Report text as content, with the markers before it. White space between calls and the end is left out."""
        said = self._pending + text.removeprefix(self._prompted)
        if said and not (self._after_call and said.isspace()):
            parsed.parts.append(said)
        self._pending = self._prompted = ""
        self._after_call = False

    @abstractmethod
    def _head(self, text: str, separator: int, end: int) -> Head | None:
        """What the header of a call says; None if it says nothing of the kind, or not yet.

        separator: position of the first separator. end: of the next marker, or of the text so far.
        """

    @abstractmethod
    def _undecided(self, text: str, separator: int, end: int) -> bool:
        """Whether more text could make a head of this."""

    def _header(self, text: str, parsed: Parsed) -> str | None:
        found = self._all.first(text)
        if found is None:
            return self._wait(text, parsed)
        place, marker = found
        if marker != self._separator or place > MAX_HEADER_CHARACTERS:
            return self._no_call(text, place, parsed)
        following = self._all.first(text[place + len(marker) :])
        end = len(text) - self._all.begun(text) if following is None else place + len(marker) + following[0]
        head = self._head(text, place, end)
        if head is not None:
            return self._call(head, text, parsed)
        if following is None and self._undecided(text, place, end):
            return self._wait(text, parsed)
        return self._no_call(text, end, parsed)

    def _wait(self, text: str, parsed: Parsed) -> str | None:
        """Hold the header back until it is whole, or too long for one."""
        if len(text) > MAX_HEADER_CHARACTERS:
            return self._no_call(text, len(text), parsed)
        self._held = text
        return None

    def _no_call(self, text: str, end: int, parsed: Parsed) -> str:
        """What seemed to be a call is content, up to `end`."""
        self._say(text[:end], parsed)
        self._state = _State.OUTSIDE
        return text[end:]

    def _call(self, head: Head, text: str, parsed: Parsed) -> str:
        if len(head.name.split()) != 1:
            return self._no_call(text, head.arguments, parsed)
        self._open |= self._begin in self._pending
        self._pending = self._prompted = ""
        self._fenced, self._reported = head.fenced, self._parallel or self.calls == 0
        if self._reported:
            parsed.parts.append(ToolCallDelta(self.calls, id=self._id(head), name=head.name))
            self.calls += 1
        self._state, self._place = _State.ARGUMENTS, JsonPlace()
        return text[head.arguments :]

    def _id(self, head: Head) -> str:
        """The model's own id, unless it has used that for another call."""
        found = self._new_id() if head.id is None or head.id in self._ids else head.id
        self._ids.add(found)
        return found

    def _arguments(self, text: str, parsed: Parsed) -> str | None:
        found = self._inner.first(text, self._place)
        place = len(text) - self._inner.begun(text) if found is None else found[0]
        fence = _FENCE_END.search(text, max(0, place - MAX_FENCE_CHARACTERS), place) if self._fenced else None
        cut = fence.start() if fence is not None and (found is None or "```" in fence[0]) else place
        self._argue(text[:cut], parsed)
        if found is None:
            self._held = text[cut:]
            return None
        self._state, self._after_call = _State.OUTSIDE, True
        return text[place + len(found[1]) :] if found[1] == self._call_end else text[place:]

    def _argue(self, arguments: str, parsed: Parsed) -> None:
        self._place.pass_over(arguments)
        if arguments and self._reported:
            parsed.parts.append(ToolCallDelta(self.calls - 1, arguments))
