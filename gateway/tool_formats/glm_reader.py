"""Finds the tool calls of GLM's models in an answer while it streams, and writes their arguments as JSON."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto
from typing import Any

from gateway.signs import Signs
from gateway.tool_formats.glm_values import TEXT, as_json, value_kinds
from gateway.tool_formats.interface import CallReader, Parsed
from gateway.tool_formats.scanning import Markers
from gateway.tools import ToolCallDelta

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
KEY_BEGIN, KEY_END = "<arg_key>", "</arg_key>"
VALUE_BEGIN, VALUE_END = "<arg_value>", "</arg_value>"
MARKERS = (CALL_BEGIN, CALL_END, KEY_BEGIN, KEY_END, VALUE_BEGIN, VALUE_END)
# A name or a key that does not end within this length is none.
MAX_HEADER_CHARACTERS = 1024
_NAME = re.compile(r"\s*[^\s{}<>]+\s*")


class _State(Enum):
    OUTSIDE = auto()
    NAME = auto()
    # Between the call's name, its keys and its values.
    INSIDE = auto()
    KEY = auto()
    # Between a key and its value.
    COLON = auto()
    VALUE = auto()


class GlmReader(CallReader):
    def __init__(
        self, signs: Signs, parallel: bool, new_id: Callable[[], str], tools: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """tools: schemas of arguments by the tools' names: they say which values are text."""
        self.calls = 0
        self._parallel = parallel
        self._new_id = new_id
        self._tools = tools
        self._begin, self._end, self._key, self._key_end, self._value, self._value_end = map(signs.of, MARKERS)
        everything = (self._begin, self._end, self._key, self._key_end, self._value, self._value_end)
        self._outer, self._all = Markers((self._begin,)), Markers(everything)
        # Inside a value letters of other markers are its text.
        self._ends = Markers([each for each in everything if len(each) == 1 or each == self._value_end])
        self._state = _State.OUTSIDE
        self._held = ""
        # What was read since the last thing that is certain: content if it turns out to be no part of a call.
        self._pending = ""
        self._after_call = False
        # The call under way.
        self._name, self._argument, self._arguments = "", "", 0
        self._reported = True
        # The value under way: its types, whether it streams as text, and its pieces if not.
        self._kinds: Collection[str] = ()
        self._streams = False
        self._pieces: list[str] = []

    def begin(self, opening: str) -> Parsed:
        parsed = self.push(opening)
        if opening and self._state is _State.NAME:
            if _NAME.fullmatch(self._held) and self._held.strip() in self._tools:
                self._call(self._held.strip(), parsed)
            self._held = ""
        self._pending = ""
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
        if self._state is _State.VALUE:
            # An answer that was cut off keeps the arguments so far.
            self._take(held, parsed)
            self._argue("".join(self._pieces), parsed)
            return parsed
        if self._state not in (_State.OUTSIDE, _State.NAME):
            self._argue("}", parsed)
        self._say(held, parsed)
        return parsed

    def _step(self, text: str, parsed: Parsed) -> str | None:
        match self._state:
            case _State.OUTSIDE:
                return self._outside(text, parsed)
            case _State.VALUE:
                return self._in_value(text, parsed)
        found = self._all.first(text)
        if found is None:
            if len(text) > MAX_HEADER_CHARACTERS:
                return self._break(text, len(text), parsed)
            self._held = text
            return None
        place, marker = found
        if place > MAX_HEADER_CHARACTERS or not self._goes_on(text[:place], marker, parsed):
            return self._break(text, place, parsed)
        return text[place + len(marker) :]

    def _goes_on(self, text: str, marker: str, parsed: Parsed) -> bool:
        """Whether a call goes on with this text and this marker."""
        match self._state:
            case _State.NAME if marker in (self._key, self._end) and _NAME.fullmatch(text):
                self._call(text.strip(), parsed)
                self._next(marker, parsed)
            case _State.INSIDE if marker in (self._key, self._end) and not text.strip():
                self._next(marker, parsed)
            case _State.KEY if marker == self._key_end and text.strip():
                self._argument, self._state = text.strip(), _State.COLON
                self._pending += text + marker
            case _State.COLON if marker == self._value and not text.strip():
                self._state, self._pending, self._pieces = _State.VALUE, "", []
                self._kinds = value_kinds(self._tools.get(self._name, {}), self._argument)
                self._streams = self._kinds == TEXT
                comma = ", " if self._arguments else ""
                quote = '"' if self._streams else ""
                self._argue(f"{comma}{json.dumps(self._argument, ensure_ascii=False)}: {quote}", parsed)
                self._arguments += 1
            case _:
                return False
        return True

    def _outside(self, text: str, parsed: Parsed) -> str | None:
        found = self._outer.first(text)
        place = len(text) - self._outer.begun(text) if found is None else found[0]
        said = text[:place]
        if said.isspace() and self._after_call and len(self._pending) < MAX_HEADER_CHARACTERS:
            self._pending += said
        elif said:
            self._say(said, parsed)
        if found is None:
            self._held = text[place:]
            return None
        self._pending += found[1]
        self._state = _State.NAME
        return text[place + len(found[1]) :]

    def _in_value(self, text: str, parsed: Parsed) -> str | None:
        found = self._ends.first(text)
        place = len(text) - self._ends.begun(text) if found is None else found[0]
        self._take(text[:place], parsed)
        if found is None:
            self._held = text[place:]
            return None
        value = "".join(self._pieces)
        self._argue('"' if self._streams else as_json(value, self._kinds), parsed)
        self._pieces, self._state = [], _State.INSIDE
        return text[place + len(found[1]) :] if found[1] == self._value_end else text[place:]

    def _take(self, text: str, parsed: Parsed) -> None:
        """A piece of a value."""
        if self._streams:
            self._argue(json.dumps(text, ensure_ascii=False)[1:-1], parsed)
        else:
            self._pieces.append(text)

    def _call(self, name: str, parsed: Parsed) -> None:
        self._name, self._arguments, self._pending = name, 0, ""
        self._reported = self._parallel or self.calls == 0
        if self._reported:
            parsed.parts.append(ToolCallDelta(self.calls, id=self._new_id(), name=name))
            self.calls += 1
        self._state = _State.INSIDE
        self._argue("{", parsed)

    def _next(self, marker: str, parsed: Parsed) -> None:
        """What comes after a call's name or a value: a key, or the call's end."""
        if marker == self._key:
            self._state, self._pending = _State.KEY, marker
        else:
            self._close(parsed)

    def _close(self, parsed: Parsed) -> None:
        self._argue("}", parsed)
        self._state, self._after_call, self._pending = _State.OUTSIDE, True, ""

    def _break(self, text: str, end: int, parsed: Parsed) -> str:
        """The call does not go on as it should: it ends, and what is left of it is content."""
        pending = self._pending
        if self._state is not _State.NAME:
            self._close(parsed)
        self._state, self._pending, self._after_call = _State.OUTSIDE, pending, False
        self._say(text[:end], parsed)
        return self._past_marker(text[end:], parsed)

    def _past_marker(self, text: str, parsed: Parsed) -> str:
        """A marker where none may be is content, unless it begins a call."""
        if not text or text.startswith(self._begin):
            return text
        found = self._all.first(text)
        length = len(found[1]) if found is not None and found[0] == 0 else 0
        self._say(text[:length], parsed)
        return text[length:]

    def _say(self, text: str, parsed: Parsed) -> None:
        said = self._pending + text
        if said and not (self._after_call and said.isspace()):
            parsed.parts.append(said)
        self._pending, self._after_call = "", False

    def _argue(self, arguments: str, parsed: Parsed) -> None:
        if arguments and self._reported:
            parsed.parts.append(ToolCallDelta(self.calls - 1, arguments))
