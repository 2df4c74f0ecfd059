"""Finds the tool calls of GLM's models in an answer while it streams, and writes their arguments as JSON."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from gateway.text.signs import Signs
from gateway.tool_formats.argument_values import TEXT, value_kinds
from gateway.tool_formats.interface import Parsed
from gateway.tool_formats.pair_reader import MAX_HEADER_CHARACTERS, PairReader, Place
from gateway.tool_formats.scanning import Markers

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
KEY_BEGIN, KEY_END = "<arg_key>", "</arg_key>"
VALUE_BEGIN, VALUE_END = "<arg_value>", "</arg_value>"
MARKERS = (CALL_BEGIN, CALL_END, KEY_BEGIN, KEY_END, VALUE_BEGIN, VALUE_END)
_NAME = re.compile(r"\s*[^\s{}<>]+\s*")


class GlmReader(PairReader):
    def __init__(
        self, signs: Signs, parallel: bool, new_id: Callable[[], str], tools: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """tools: their schemas say which values are text."""
        super().__init__(parallel, new_id, tools)
        everything = tuple(map(signs.of, MARKERS))
        self._begin, self._end, self._key, self._key_end, self._value_begin, self._value_end = everything
        self._outer, self._all = Markers((self._begin,)), Markers(everything)
        # Inside a value letters of other markers are its text.
        self._ends = Markers([each for each in everything if len(each) == 1 or each == self._value_end])
        self._argument = ""

    def begin(self, opening: str) -> Parsed:
        parsed = self.push(opening)
        if opening and self._place is Place.NAME:
            if _NAME.fullmatch(self._held) and self._held.strip() in self._tools:
                self._call(self._held.strip(), parsed)
            self._held = ""
        self._pending = ""
        return parsed

    def _step(self, text: str, parsed: Parsed) -> str | None:
        match self._place:
            case Place.OUTSIDE:
                return self._outside(text, parsed)
            case Place.VALUE:
                return self._in_value(text, parsed)
        found = self._all.first(text)
        if found is None:
            if len(text) > MAX_HEADER_CHARACTERS:
                return self._break(text, len(text), parsed)
            self._held = text
            return None
        place, marker = found
        if place > MAX_HEADER_CHARACTERS or not self._goes_on(text[:place], marker, parsed):
            return self._past_marker(self._break(text, place, parsed), parsed)
        return text[place + len(marker) :]

    def _goes_on(self, text: str, marker: str, parsed: Parsed) -> bool:
        """Whether a call goes on with this text and this marker."""
        match self._place:
            case Place.NAME if marker in (self._key, self._end) and _NAME.fullmatch(text):
                self._call(text.strip(), parsed)
                self._next(marker, parsed)
            case Place.INSIDE if marker in (self._key, self._end) and not text.strip():
                self._next(marker, parsed)
            case Place.KEY if marker == self._key_end and text.strip():
                self._argument, self._place = text.strip(), Place.COLON
                self._pending += text + marker
            case Place.COLON if marker == self._value_begin and not text.strip():
                kinds = value_kinds(self._tools.get(self._name, {}), self._argument)
                self._begin_value(self._argument, kinds, kinds == TEXT, parsed)
            case _:
                return False
        return True

    def _outside(self, text: str, parsed: Parsed) -> str | None:
        found = self._said_before(self._outer, text, parsed)
        if found is None:
            return None
        marker, rest = found
        self._pending += marker
        self._place = Place.NAME
        return rest

    def _in_value(self, text: str, parsed: Parsed) -> str | None:
        found = self._value(self._ends, text, parsed)
        return None if found is None else found[1].removeprefix(self._value_end)

    def _next(self, marker: str, parsed: Parsed) -> None:
        """What comes after a call's name or a value: a key, or the call's end."""
        if marker == self._key:
            self._place, self._pending = Place.KEY, marker
        else:
            self._close(parsed)

    def _past_marker(self, text: str, parsed: Parsed) -> str:
        """A marker where none may be is content, unless it begins a call."""
        if not text or text.startswith(self._begin):
            return text
        found = self._all.first(text)
        length = len(found[1]) if found is not None and found[0] == 0 else 0
        self._say(text[:length], parsed)
        return text[length:]
