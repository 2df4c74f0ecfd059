"""Which format of tool calls a model writes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.tool_formats.deepseek import V3, V31
from gateway.tool_formats.dsml import V32
from gateway.tool_formats.dsml_reader import DSML
from gateway.tool_formats.glm import COMPACT, LINES
from gateway.tool_formats.glm_reader import KEY_BEGIN, KEY_END, VALUE_BEGIN
from gateway.tool_formats.interface import ToolFormat
from gateway.tool_formats.kimi import K2
from gateway.tools import ToolCall

FORMATS: Sequence[ToolFormat] = (V3, V31, V32, K2, LINES, COMPACT)
MARKERS = frozenset[str]().union(*(each.markers for each in FORMATS))


def format_of(template: str, control_id: Callable[[str], int | None]) -> ToolFormat:
    """The format in which a chat template shows calls to its model; or, if it shows none, that of the vocabulary.

    control_id: the id of the token with this text; None if there is none.
    """
    shown = {V31.begin: _deepseek, DSML: lambda _: V32, K2.begin: lambda _: K2, KEY_BEGIN: _glm}
    found = [each for each in shown if each in template]
    found += [each for each in (DSML, K2.begin, KEY_BEGIN) if control_id(each) is not None]
    return shown[found[0] if found else V31.begin](template)


def _deepseek(template: str) -> ToolFormat:
    return V3 if "```json" in template else V31


def _glm(template: str) -> ToolFormat:
    return COMPACT if KEY_END + VALUE_BEGIN in template else LINES


def written_tools(tools: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    """System text that tells a model which tools there are, for templates that do not. tools: in OpenAI's form."""
    parts = ["## Tools\nThese functions can be called:"]
    for tool in tools:
        function = tool["function"]
        schema = msgspec.json.encode(function.get("parameters") or {}).decode()
        description = function.get("description") or ""
        parts.append(f"### {function['name']}\n{description}\nParameters (JSON schema): {schema}")
    example = form.calls([ToolCall("", "NAME", "ARGUMENTS")])
    parts.append(
        f"To call functions, write their names and their arguments as JSON in exactly this form:\n{example}\n"
        "Several calls stand one after the other inside the outer markers. Wait for their results before you answer."
    )
    return "\n\n".join(parts)
