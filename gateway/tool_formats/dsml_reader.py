"""Finds the tool calls of DeepSeek-V3.2 in an answer while it streams, and writes their arguments as JSON."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from gateway.text.signs import Signs
from gateway.tool_formats.argument_values import TEXT, value_kinds
from gateway.tool_formats.interface import Parsed
from gateway.tool_formats.pair_reader import MAX_HEADER_CHARACTERS, PairReader, Place
from gateway.tool_formats.scanning import Markers

# A token of the models' vocabularies; the rest of each tag is written in letters.
DSML = "｜DSML｜"
CALLS_BEGIN, CALLS_END = f"<{DSML}function_calls>", f"</{DSML}function_calls>"
# Tags with attributes, up to the first one's value.
CALL_BEGIN, CALL_END = f'<{DSML}invoke name="', f"</{DSML}invoke>"
PARAMETER_BEGIN, PARAMETER_END = f'<{DSML}parameter name="', f"</{DSML}parameter>"
# Stands between an answer's text and its calls.
LEAD = "\n\n"
_NAME = re.compile(r'([^\s"<>]+)"\s*>')
# Some answers leave the second attribute out.
_KEY = re.compile(r'(.*?)"(?:\s+string="(true|false)")?\s*>', re.DOTALL)


class DsmlReader(PairReader):
    def __init__(
        self, signs: Signs, parallel: bool, new_id: Callable[[], str], tools: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """tools: their schemas say what a value is whose attribute contradicts them."""
        super().__init__(parallel, new_id, tools)
        self._begin, self._end = signs.signed(CALLS_BEGIN), signs.signed(CALLS_END)
        self._call_begin, self._call_end = signs.signed(CALL_BEGIN), signs.signed(CALL_END)
        self._key_begin, self._value_end = signs.signed(PARAMETER_BEGIN), signs.signed(PARAMETER_END)
        self._outer = Markers((LEAD + self._begin, self._begin, self._call_begin, self._end))
        self._tags = Markers([f"<{signs.of(DSML)}", f"</{signs.of(DSML)}"])
        self._ends = Markers((self._value_end,))
        # Whether the markers around all calls are open.
        self._open = False

    def begin(self, opening: str) -> Parsed:
        self._open = bool(opening)
        return super().begin(opening)

    def _step(self, text: str, parsed: Parsed) -> str | None:
        match self._place:
            case Place.OUTSIDE:
                return self._outside(text, parsed)
            case Place.INSIDE:
                return self._inside(text, parsed)
            case Place.VALUE:
                found = self._value(self._ends, text, parsed)
                return None if found is None else found[1].removeprefix(self._value_end)
        header = self._header(_NAME if self._place is Place.NAME else _KEY, text)
        if header is None:
            return self._wait(text, parsed)
        if self._place is Place.NAME:
            self._open |= self._begin in self._pending
            self._call(header[1], parsed)
        else:
            self._argument(header[1], header[2], parsed)
        return text[header.end() :]

    def _header(self, pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
        """The rest of a tag with attributes; None if it is none, or not yet."""
        found, tag = pattern.match(text), self._tags.first(text)
        whole = found is not None and found.end() <= min(MAX_HEADER_CHARACTERS, len(text) if tag is None else tag[0])
        return found if whole else None

    def _wait(self, text: str, parsed: Parsed) -> str | None:
        """Hold a tag back until it is whole. If it will never be one, the call ends before it."""
        if len(text) <= MAX_HEADER_CHARACTERS and self._tags.first(text) is None:
            self._held = text
            return None
        return self._break(text, 0, parsed)

    def _outside(self, text: str, parsed: Parsed) -> str | None:
        found = self._said_before(self._outer, text, parsed)
        if found is None:
            return None
        marker, rest = found
        if marker == self._end:
            self._end_calls(parsed)
        else:
            if marker != self._call_begin and self._begin in self._pending:
                self._say("", parsed)
            self._pending += marker
            self._place = Place.NAME if marker == self._call_begin else Place.OUTSIDE
        return rest

    def _end_calls(self, parsed: Parsed) -> None:
        """The marker that ends all calls. Where none are open it is content."""
        if not self._open:
            self._say(self._end, parsed)
            return
        if self._begin in self._pending:
            self._say("", parsed)
        self._open, self._after_call, self._pending = False, True, ""

    def _inside(self, text: str, parsed: Parsed) -> str | None:
        """Between a call's arguments: the next one, or the call's end."""
        written = text.lstrip()
        if written.startswith(self._call_end):
            self._close(parsed)
            return written.removeprefix(self._call_end)
        if written.startswith(self._key_begin):
            self._place, self._pending = Place.KEY, self._key_begin
            return written.removeprefix(self._key_begin)
        if len(text) <= MAX_HEADER_CHARACTERS and any(
            each.startswith(written) for each in (self._call_end, self._key_begin)
        ):
            self._held = text
            return None
        return self._break(text, 0, parsed)

    def _argument(self, key: str, attribute: str | None, parsed: Parsed) -> None:
        kinds = value_kinds(self._tools.get(self._name, {}), key)
        text = kinds == TEXT if attribute is None else attribute == "true" and (not kinds or "string" in kinds)
        self._begin_value(key, kinds, text, parsed)
