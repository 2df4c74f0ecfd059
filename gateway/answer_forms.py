"""What a client may ask an answer to be, and how Lark says so: the right side of a rule, or a grammar of its own."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import msgspec
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from gateway.tools import check_nesting
from mesh.errors import InvalidConstraint

MAX_CHOICES = 1000
# Bounds the text of a GBNF grammar (llama.cpp's), which is read in Python.
MAX_GBNF_CHARACTERS = 16 * 1024
# At the begin of a line. The library's own test takes time with the square of blank lines, with the lock held.
LARK = re.compile(r"\s*(%llguidance\b|start\s*:)")
# Between the parts of JSON: a space, or a new line and its indent. Without a bound a model that has lost its way fills
# the answer with it.
WHITESPACE = r" |\n {0,16}"
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class JsonForm:
    schema: Mapping[str, Any]
    # What its client calls it, for errors; so in the other forms.
    field: str
    # Parts of the schema that cannot be enforced are left out.
    lenient: bool = False

    def rule(self) -> str:
        check_nesting(self.schema, self.field)
        return json_rule(self.schema, self.lenient)


@dataclass(frozen=True, slots=True)
class RegexForm:
    pattern: str
    field: str

    def rule(self) -> str:
        if not self.pattern or "\0" in self.pattern:
            raise InvalidConstraint("the regular expression is empty or holds a zero byte")
        return f"/{regex_to_lark(self.pattern)}/"


@dataclass(frozen=True, slots=True)
class ChoiceForm:
    texts: Sequence[str]
    field: str

    def rule(self) -> str:
        if not self.texts or not all(self.texts):
            raise InvalidConstraint("the choices are none, or one is empty: send at least one text")
        if len(self.texts) > MAX_CHOICES:
            raise InvalidConstraint(f"there are {len(self.texts)} choices, the limit is {MAX_CHOICES}")
        return " | ".join(map(literal, self.texts))


@dataclass(frozen=True, slots=True)
class GrammarForm:
    """Lark, or llama.cpp's GBNF."""

    text: str
    field: str

    def in_lark(self) -> "GrammarForm":
        """The same in Lark. May take a second. Raises InvalidConstraint."""
        if any(map(LARK.match, self.text.splitlines())):
            return self
        if len(self.text) > MAX_GBNF_CHARACTERS:
            raise InvalidConstraint(
                f"the grammar has {len(self.text)} characters, the limit for GBNF is {MAX_GBNF_CHARACTERS}: write Lark"
            )
        try:
            return replace(self, text=gbnf_to_lark(self.text))
        # The library raises Exception itself for most of what it cannot read.
        except Exception as error:
            raise InvalidConstraint(f"the grammar cannot be read: {error}") from error


AnswerForm: TypeAlias = JsonForm | RegexForm | ChoiceForm | GrammarForm


def json_rule(schema: Mapping[str, Any], lenient: bool) -> str:
    options = {"whitespace_pattern": WHITESPACE, "lenient": lenient}
    return "%json " + msgspec.json.encode({**schema, "x-guidance": options}).decode()


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema without properties that it does not name, unless it says more of them.

    Functions rarely take what they do not name. Parts of allOf are left alone: they name one another's properties.
    """
    if "allOf" in schema:
        return schema
    changed = {key: _closed_parts(key, value) for key, value in schema.items()}
    says_more = {"additionalProperties", "patternProperties", "unevaluatedProperties"} & schema.keys()
    return changed if "properties" not in schema or says_more else {**changed, "additionalProperties": False}


def _closed_parts(key: str, value: Any) -> Any:
    if key in ("properties", "$defs", "definitions") and isinstance(value, dict):
        return {name: closed(each) if isinstance(each, dict) else each for name, each in value.items()}
    if key in ("anyOf", "oneOf") and isinstance(value, list):
        return [closed(each) if isinstance(each, dict) else each for each in value]
    return closed(value) if key == "items" and isinstance(value, dict) else value


def literal(text: str) -> str:
    """Text as Lark quotes it, which is as JSON does."""
    return json.dumps(text, ensure_ascii=False)
