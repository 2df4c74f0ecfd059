"""The forms that a client may ask an answer to have, each written in Lark: as the right side of a rule or as a
grammar.
"""

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
# Bounds the text of a GBNF grammar (llama.cpp's), which a parser in Python reads.
MAX_GBNF_CHARACTERS = 16 * 1024
# Matches at the beginning of a line. The library's own test takes time quadratic in blank lines and holds the GIL.
LARK = re.compile(r"\s*(%llguidance\b|start\s*:)")
# White space between the parts of JSON: a space, or a line break and its indent. Without a bound a model that has lost
# its way fills the answer with white space.
WHITESPACE = r" |\n {0,16}"
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class JsonForm:
    schema: Mapping[str, Any]
    # The client's name of the request field that asks for this form, for errors; so in the other forms.
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
        """The same grammar in Lark. May take a second. Raises InvalidConstraint."""
        if any(map(LARK.match, self.text.splitlines())):
            return self
        if len(self.text) > MAX_GBNF_CHARACTERS:
            raise InvalidConstraint(
                f"the grammar has {len(self.text)} characters, the limit for GBNF is {MAX_GBNF_CHARACTERS}: write Lark"
            )
        try:
            return replace(self, text=gbnf_to_lark(self.text))
        # For most grammars that it cannot read the library raises a plain Exception.
        except Exception as error:
            raise InvalidConstraint(f"the grammar cannot be read: {error}") from error


AnswerForm: TypeAlias = JsonForm | RegexForm | ChoiceForm | GrammarForm


def json_rule(schema: Mapping[str, Any], lenient: bool) -> str:
    options = {"whitespace_pattern": WHITESPACE, "lenient": lenient}
    return "%json " + msgspec.json.encode({**schema, "x-guidance": options}).decode()


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema, changed to refuse properties that it does not name, unless it says something about those.

    Functions rarely take arguments that they do not name. Schemas with allOf are left alone: their parts name one
    another's properties.
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
    """Text quoted for Lark, which has the same quoting as JSON."""
    return json.dumps(text, ensure_ascii=False)
