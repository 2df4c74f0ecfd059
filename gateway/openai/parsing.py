"""Decodes a body into one of the request types; errors name the wrong field."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

import msgspec

from gateway.json_cost import MAX_MILLISECONDS, TOO_MANY_VALUES, decoding_ms
from gateway.openai.known_values import known_values
from gateway.openai.malformed import malformed
from mesh.errors import BodyTooLarge, InvalidRequest, MissingField, UnknownField, WrongType

# Unknown fields that one body may have if they are ignored. Each costs another reading of the body, and all readings
# together may take no longer than one may.
MAX_IGNORED_FIELDS = 32
# The body is decoded as a tree, encoded without the field, and decoded again.
READINGS_A_FIELD = 4
# A longer unknown name resembles none of ours, so it is not compared: one that fills the body would take seconds.
MAX_MISTAKEN_CHARACTERS = 100

# Fields that other endpoints have, for clients that send one to the wrong endpoint.
_ELSEWHERE = {
    "messages": "/v1/chat/completions takes it",
    "prompt": "/v1/completions takes it",
    "input": "/v1/responses takes it",
}
_PLACE = re.compile(r".* - at (?:`\w+` in )?`\$\.?(?P<place>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*?)`(?: - at |$)", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*?)`(?: - at `\$.*`)?$", re.DOTALL)
_VALUE = re.compile(r"^Invalid (?:enum )?value (?P<value>['\"].*['\"]) - at ", re.DOTALL)
_STEP = re.compile(r"\[(?P<index>\d+)\]|(?P<name>[^.\[\]]+)")

BodyT = TypeVar("BodyT", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Parsed(Generic[BodyT]):
    body: BodyT
    # Fields that we do not know, as paths ("messages[0].mood"); empty unless they may be ignored.
    ignored: Sequence[str]
    # The JSON that the body was decoded from, without those fields.
    content: bytes


def parse(kind: type[BodyT], content: bytes, *, ignore_unknown: bool = False) -> Parsed[BodyT]:
    """Decode `content` as `kind`, which must forbid unknown fields.

    Raises InvalidRequest naming the first field that is wrong, for malformed JSON too; UnknownField, MissingField and
    WrongType are kinds of it, and BodyTooLarge if decoding would hold the event loop for long. With `ignore_unknown`
    fields that we do not know are left out instead.
    """
    cost = decoding_ms(content)
    if cost > MAX_MILLISECONDS:
        raise BodyTooLarge(f"the body {TOO_MANY_VALUES}")
    ignored: list[str] = []
    while True:
        try:
            return Parsed(msgspec.json.decode(content, type=kind), ignored, content)
        except msgspec.ValidationError as error:
            unknown = _UNKNOWN.match(str(error))
            readings = 1 + READINGS_A_FIELD * (len(ignored) + 1)
            again = readings * cost <= MAX_MILLISECONDS and len(ignored) < MAX_IGNORED_FIELDS
            if unknown is None or not ignore_unknown or not again:
                raise _complaint(str(error), kind) from error
            place, name = _place(str(error)), unknown["name"]
            try:
                content = _without(content, place, name)
            except LookupError:
                # The field's name looks like the end of msgspec's message, so its place cannot be read from the
                # message.
                raise _complaint(str(error), kind) from error
            ignored.append(_join(place, name))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise malformed(content, error) from error


def _complaint(message: str, kind: type[msgspec.Struct]) -> InvalidRequest:
    place = _place(message)
    if (unknown := _UNKNOWN.match(message)) is not None:
        name = unknown["name"]
        field = _join(place, name)
        comparable = not place and len(name) <= MAX_MISTAKEN_CHARACTERS
        near = get_close_matches(name, kind.__struct_fields__, 1) if comparable else []
        advice = f"did you mean {near[0]!r}?" if near else _ELSEWHERE.get(field, "leave it out")
        return UnknownField(f"unknown field {field!r}: {advice}", field=field)
    if (missing := _MISSING.match(message)) is not None:
        field = _join(place, missing["name"])
        return MissingField(f"the field {field!r} is missing", field=field)
    if place and (value := _VALUE.match(message)) is not None:
        known = ", ".join(map(repr, known_values(kind, _steps(place))))
        return InvalidRequest(f"{place} is {value['value']}: it takes {known}", field=place)
    if place:
        wrong = message.partition(" - at ")[0]
        subject = f"a key of {place}" if message.partition(" - at ")[2].startswith("`key`") else place
        return WrongType(f"{subject}: {wrong[0].lower()}{wrong[1:]}", field=place)
    return InvalidRequest(f"the body: {message[0].lower()}{message[1:]}")


def _place(message: str) -> str:
    """The path in msgspec's message of the object or value that is wrong; empty if it is the whole body."""
    found = _PLACE.match(message)
    return "" if found is None else found["place"]


def _steps(place: str) -> list[str | int]:
    steps = _STEP.finditer(place)
    return [step["name"] if step["index"] is None else int(step["index"]) for step in steps]


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _without(content: bytes, place: str, name: str) -> bytes:
    """The same body without one field of the object at `place`.

    Raises InvalidRequest if the body is nested too deep, LookupError if it has no such field.
    """
    try:
        tree: Any = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise malformed(content, error) from error
    node = tree
    for step in _steps(place):
        node = node[step]
    del node[name]
    return msgspec.json.encode(tree)
