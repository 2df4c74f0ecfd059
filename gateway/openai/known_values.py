"""Finds the values that a field takes, if it takes only certain ones."""

from collections.abc import Iterator
from typing import Any

from msgspec import Struct, inspect


def known_values(kind: type[Struct], steps: list[str | int]) -> list[str]:
    """The texts allowed at a place in a body, given by field names and indices; none if other values are allowed
    too.
    """
    return sorted({text for found in _at(inspect.type_info(kind), steps) for text in _texts(found)})


def _at(found: inspect.Type, steps: list[str | int]) -> Iterator[inspect.Type]:
    """The types that a value at the place may have; `found` is the type at the place where the steps begin."""
    match found:
        case inspect.Metadata():
            yield from _at(found.type, steps)
        case inspect.UnionType():
            for each in found.types:
                yield from _at(each, steps)
        case _ if not steps:
            yield found
        case inspect.ListType() if isinstance(steps[0], int):
            yield from _at(found.item_type, steps[1:])
        case inspect.StructType():
            if found.tag_field == steps[0]:
                yield inspect.LiteralType((found.tag,))
            for field in found.fields:
                if field.encode_name == steps[0]:
                    yield from _at(field.type, steps[1:])


def _texts(found: inspect.Type) -> Iterator[Any]:
    if isinstance(found, inspect.LiteralType):
        yield from (value for value in found.values if isinstance(value, str))
