"""Says what is wrong with a body that is no JSON."""

import json
import re
from collections.abc import Iterator
from typing import Any

from mesh.errors import InvalidRequest

# A longer body is not searched for the field that is wrong: it is read once more for that.
MAX_SEARCHED_BYTES = 2**20

_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def malformed(content: bytes, error: Exception) -> InvalidRequest:
    """error: what the decoder raised: DecodeError, UnicodeDecodeError or RecursionError."""
    if not content.strip():
        return InvalidRequest("the body is empty: send a JSON object")
    if isinstance(error, UnicodeDecodeError):
        return InvalidRequest(_not_utf8(content))
    if isinstance(error, RecursionError):
        return InvalidRequest("the body is nested too deep")
    if _ESCAPED_SURROGATE.search(content) is not None and (half := _half_a_pair(content)) is not None:
        return half
    why = "it ends too early" if "truncated" in str(error) else str(error).removeprefix("JSON is malformed: ")
    return InvalidRequest(f"the body is not valid JSON: {why}")


def _not_utf8(content: bytes) -> str:
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return f"the body is not in UTF-8: byte {error.start} is {content[error.start]:#04x}"
    raise AssertionError("the decoder refused a body that is in UTF-8")


def _half_a_pair(content: bytes) -> InvalidRequest | None:
    """The complaint about a text with half of a surrogate pair; None if that is not what is wrong."""
    if len(content) > MAX_SEARCHED_BYTES:
        return None
    try:
        found = next(_surrogates(json.loads(content), ""), None)
    except (ValueError, RecursionError):
        return None
    if found is None:
        return None
    field, half = found
    wrong = f"{field or 'the body'} has half of a surrogate pair, \\u{ord(half):04x}"
    return InvalidRequest(f"{wrong}: escape both halves, or send the character in UTF-8", field=field or None)


def _surrogates(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Places of texts, keys among them, that have half a pair, and the half."""
    if isinstance(value, str):
        yield from ((place, half[0]) for half in _SURROGATE.finditer(value))
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _surrogates(key, place)
            yield from _surrogates(inner, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _surrogates(inner, f"{place}[{index}]")
