"""Reads the calls of DeepSeek's models, in either of their forms."""

import re
from collections.abc import Callable

from gateway.text.signs import Signs
from gateway.tool_formats.marked_reader import CallMarkers, Head, MarkedReader

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCED_KIND = "function"
# A name, and what shows that it has ended.
_NAME = re.compile(r"\s*(?P<name>[^\s`{]+)(?=[\s`{])")
_FENCE = re.compile(r"\s*```[A-Za-z]*[ \t]*(\r?\n|(?=[^\sA-Za-z]))")
# The beginning of a fence, or white space before one.
_FENCE_BEGUN = re.compile(r"\s*(`{1,2}|```[A-Za-z]*\s*)?")


class DeepSeekReader(MarkedReader):
    def __init__(self, signs: Signs, parallel: bool, new_id: Callable[[], str]) -> None:
        markers = CallMarkers(CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
        super().__init__(markers, signs, parallel, new_id)

    def _head(self, text: str, separator: int, end: int) -> Head | None:
        begin, kind = separator + len(self._separator), text[:separator].strip()
        if kind != FENCED_KIND or text[begin:end].lstrip().startswith("{"):
            return Head(kind, begin)
        name = _NAME.match(text, begin, end)
        if name is None:
            return None
        fence = _FENCE.match(text, name.end(), end)
        if fence is not None:
            return Head(name["name"], fence.end(), fenced=True)
        return Head(name["name"], name.end()) if text[name.end() : end].lstrip().startswith("{") else None

    def _undecided(self, text: str, separator: int, end: int) -> bool:
        name = _NAME.match(text, separator + len(self._separator), end)
        return name is None or _FENCE_BEGUN.fullmatch(text, name.end(), end) is not None
