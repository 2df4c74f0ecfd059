"""Rules, in Lark, of arguments that a model writes one by one."""

from collections.abc import Callable, Mapping
from typing import Any

from gateway.forms.answer_forms import json_rule
from gateway.forms.schema_keywords import COMBINING, DEFINITIONS
from gateway.forms.schema_refs import resolved
from mesh.errors import InvalidConstraint

EMPTY = '""'
_TEXT_LIMITS = frozenset(("pattern", "minLength", "maxLength", "format", "anyOf", "oneOf"))


def pair_rules(
    name: str,
    schema: Mapping[str, Any],
    pair: Callable[[str | None, str], str],
    value: Callable[[str, Any], str],
    anything: str,
) -> list[str]:
    """Definitions of a rule of this name for arguments that match the schema; properties come in the schema's order.

    pair: the right side of a rule for one argument, of its key (None for any) and the name of its value's rule. value:
    that of the value with this key and schema. anything: the rule of a value without a schema.
    """
    properties = schema.get("properties")
    named: Mapping[str, Any] = properties if isinstance(properties, dict) else {}
    rules, parts = list[str](), list[str]()
    for index, (key, each) in enumerate(named.items()):
        rule = f"{name}_{index}"
        rules.append(f"{rule}: {value(key, each)}")
        written = pair(key, rule)
        parts.append(written if key in schema.get("required", ()) else f"({written})?")
    if schema.get("additionalProperties") is not False or not COMBINING.isdisjoint(schema):
        parts.append(f"({pair(None, anything)})*")
    return [f"{name}: {' '.join(parts) or EMPTY}", *rules]


def json_value(schema: Mapping[str, Any], value: Any, lenient: bool) -> str:
    """The right side of a rule for a value in JSON. schema: of the arguments, whose definitions the value's may use."""
    definitions = {name: schema[name] for name in DEFINITIONS & schema.keys()}
    return json_rule({**value, **definitions} if isinstance(value, dict) else definitions, lenient)


def texts_of(schema: Mapping[str, Any], key: str, value: Mapping[str, Any], lenient: bool) -> list[str]:
    """The texts that the value of this key may be, whose schema allows text alone; empty if it may be any.

    Raises InvalidConstraint if the schema limits text in another way, unless it is lenient.
    """
    while isinstance(target := resolved(schema, value.get("$ref", "")), dict):
        value = target
    if not lenient and (limits := _TEXT_LIMITS & value.keys()):
        raise InvalidConstraint(f"{min(limits)} of {key!r} cannot be enforced in this model's calls: leave strict out")
    choices = value.get("enum", [value["const"]] if "const" in value else [])
    return [choice for choice in choices if isinstance(choice, str)]
