"""How Kimi K2 writes tool calls: an id, which holds the name and the call's number in the chat, and arguments in JSON.

Source: the chat template that Moonshot AI publishes with Kimi-K2-Instruct, and its guide to tool calls.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.text.signs import Signs
from gateway.tool_formats.interface import CallReader, Piece, ToolFormat
from gateway.tool_formats.marked_reader import CallMarkers, Head, MarkedReader

MARKERS = CallMarkers(
    begin="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    call_begin="<|tool_call_begin|>",
    call_end="<|tool_call_end|>",
    separator="<|tool_call_argument_begin|>",
)
NUMBER = Piece("/[0-9]{1,4}/")
_ID = re.compile(r"(functions\.)?(?P<name>[^\s:]+)(:[0-9]+)?")


class KimiK2(ToolFormat):
    """functions.NAME:NUMBER, separator, arguments."""

    markers = frozenset(MARKERS)
    begin, end, between = MARKERS.begin, MARKERS.end, ""
    head = (MARKERS.call_begin, "functions.")
    tail = (MARKERS.call_end,)

    def after_name(self, index: int | None) -> Sequence[str | Piece]:
        return (":", NUMBER if index is None else str(index), MARKERS.separator)

    def outputs(self, outputs: Sequence[str]) -> str:
        return "\n".join(f"## Return of call {index}\n{output}" for index, output in enumerate(outputs))

    def reader(
        self, signs: Signs, parallel: bool, new_id: Callable[[], str], tools: Mapping[str, Mapping[str, Any]]
    ) -> CallReader:
        return _Reader(MARKERS, signs, parallel, new_id)


class _Reader(MarkedReader):
    def _head(self, text: str, separator: int, end: int) -> Head | None:
        call_id = text[:separator].strip()
        found = _ID.fullmatch(call_id)
        return None if found is None else Head(found["name"], separator + len(self._separator), id=call_id)

    def _undecided(self, text: str, separator: int, end: int) -> bool:
        return False


K2 = KimiK2()
