"""What readers share of calls whose arguments are written one by one: each becomes a member of a JSON object."""

import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto
from typing import Any

from gateway.tool_formats.argument_values import as_json
from gateway.tool_formats.interface import CallReader, Parsed
from gateway.tool_formats.scanning import Markers
from gateway.tools import ToolCallDelta

# A name or a key that does not end within this length is none.
MAX_HEADER_CHARACTERS = 1024


class Place(Enum):
    """Where in an answer the text continues."""

    OUTSIDE = auto()
    NAME = auto()
    # Between the call's name, its keys and its values.
    INSIDE = auto()
    KEY = auto()
    # Between a key and its value.
    COLON = auto()
    VALUE = auto()


class PairReader(CallReader):
    def __init__(self, parallel: bool, new_id: Callable[[], str], tools: Mapping[str, Mapping[str, Any]]) -> None:
        """parallel: whether to report calls after the first. tools: schemas of arguments by the tools' names."""
        self.calls = 0
        self._parallel = parallel
        self._new_id = new_id
        self._tools = tools
        self._place = Place.OUTSIDE
        self._held = ""
        # What was read since the last thing that is certain: content if it turns out to be no part of a call.
        self._pending = ""
        self._after_call = False
        # The call under way.
        self._name, self._arguments = "", 0
        self._reported = True
        # The value under way: its types, whether it streams as text, and its pieces if not.
        self._kinds: Collection[str] = ()
        self._streams = False
        self._pieces: list[str] = []

    def begin(self, opening: str) -> Parsed:
        parsed = self.push(opening)
        self._pending = self._held = ""
        return parsed

    def push(self, text: str) -> Parsed:
        parsed = Parsed()
        rest: str | None = self._held + text
        self._held = ""
        while rest is not None:
            rest = self._step(rest, parsed)
        return parsed

    def finish(self) -> Parsed:
        parsed = Parsed()
        held, self._held = self._held, ""
        if self._place is Place.VALUE:
            # An answer that was cut off keeps the arguments so far.
            self._take(held, parsed)
            self._argue("".join(self._pieces), parsed)
            return parsed
        pending = self._pending
        if self._place not in (Place.OUTSIDE, Place.NAME):
            self._close(parsed)
        self._pending = pending
        self._say(held, parsed)
        return parsed

    @abstractmethod
    def _step(self, text: str, parsed: Parsed) -> str | None:
        """Read on from the place where the text begins. Returns the text after what was used; None if more is needed,
        and the rest is held back.
        """

    def _said_before(self, markers: Markers, text: str, parsed: Parsed) -> tuple[str, str] | None:
        """Outside of calls: report the text before the first of the markers. Returns the marker and what follows it;
        None if there is none.
        """
        found = markers.first(text)
        place = len(text) - markers.begun(text) if found is None else found[0]
        said = text[:place]
        if said.isspace() and (self._pending or self._after_call) and len(self._pending) < MAX_HEADER_CHARACTERS:
            self._pending += said
        elif said:
            self._say(said, parsed)
        if found is None:
            self._held = text[place:]
            return None
        return found[1], text[place + len(found[1]) :]

    def _call(self, name: str, parsed: Parsed) -> None:
        self._name, self._arguments, self._pending = name, 0, ""
        self._reported = self._parallel or self.calls == 0
        if self._reported:
            parsed.parts.append(ToolCallDelta(self.calls, id=self._new_id(), name=name))
            self.calls += 1
        self._place = Place.INSIDE
        self._argue("{", parsed)

    def _begin_value(self, key: str, kinds: Collection[str], text: bool, parsed: Parsed) -> None:
        """kinds: the JSON types that the value may have. text: whether it is text, whatever it looks like."""
        self._place, self._pending, self._pieces = Place.VALUE, "", []
        self._kinds, self._streams = kinds, text
        comma = ", " if self._arguments else ""
        quote = '"' if text else ""
        self._argue(f"{comma}{json.dumps(key, ensure_ascii=False)}: {quote}", parsed)
        self._arguments += 1

    def _value(self, ends: Markers, text: str, parsed: Parsed) -> tuple[str, str] | None:
        """A value up to the first of the markers. Returns the marker and the text from there on; None if there is
        none.
        """
        found = ends.first(text)
        place = len(text) - ends.begun(text) if found is None else found[0]
        self._take(text[:place], parsed)
        if found is None:
            self._held = text[place:]
            return None
        self._argue('"' if self._streams else as_json("".join(self._pieces), self._kinds), parsed)
        self._pieces, self._place = [], Place.INSIDE
        return found[1], text[place:]

    def _take(self, text: str, parsed: Parsed) -> None:
        """A piece of a value."""
        if self._streams:
            self._argue(json.dumps(text, ensure_ascii=False)[1:-1], parsed)
        else:
            self._pieces.append(text)

    def _close(self, parsed: Parsed) -> None:
        self._argue("}", parsed)
        self._place, self._after_call, self._pending = Place.OUTSIDE, True, ""

    def _break(self, text: str, end: int, parsed: Parsed) -> str:
        """The call is malformed: end it, and report its rest, up to `end`, as content."""
        pending = self._pending
        if self._place is not Place.NAME:
            self._close(parsed)
        self._place, self._pending, self._after_call = Place.OUTSIDE, pending, False
        self._say(text[:end], parsed)
        return text[end:]

    def _say(self, text: str, parsed: Parsed) -> None:
        said = self._pending + text
        if said and not (self._after_call and said.isspace()):
            parsed.parts.append(said)
        self._pending, self._after_call = "", False

    def _argue(self, arguments: str, parsed: Parsed) -> None:
        if arguments and self._reported:
            parsed.parts.append(ToolCallDelta(self.calls - 1, arguments))
