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

from gateway.forms.schema_limits import check_exact
from gateway.tools import check_nesting
from mesh.errors import InvalidConstraint
from mesh.text.grammars import check_grammar

MAX_CHOICES = 1000
# Bounds the text of a GBNF grammar (llama.cpp's), which a parser in Python reads.
MAX_GBNF_CHARACTERS = 16 * 1024
# Bounds a grammar that a client writes in Lark. A mask takes time quadratic in the parts in a row that may be empty,
# 0.3 s for as many as fit, while all requests of the worker wait. JSON schemas make no such rows.
MAX_LARK_CHARACTERS = 32 * 1024
# Follows a grammar that a client writes; of several such lines the last counts. Without it the library follows the text
# that a grammar leaves no choice about, and never ends if that has no end: two terminals "a"+ in a row, and then "a".
UNFORCED = '\n%llguidance {"no_forcing": true}\n'
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
        lark = self.text if any(map(LARK.match, self.text.splitlines())) else self._from_gbnf()
        if len(lark) > MAX_LARK_CHARACTERS:
            raise InvalidConstraint(
                f"the grammar has {len(lark)} characters in Lark, the limit is {MAX_LARK_CHARACTERS}: shorten it"
            )
        return replace(self, text=lark + UNFORCED)

    def _from_gbnf(self) -> str:
        if len(self.text) > MAX_GBNF_CHARACTERS:
            raise InvalidConstraint(
                f"the grammar has {len(self.text)} characters, the limit for GBNF is {MAX_GBNF_CHARACTERS}: write Lark"
            )
        try:
            return str(gbnf_to_lark(self.text))
        # For most grammars that it cannot read the library raises a plain Exception.
        except Exception as error:
            raise InvalidConstraint(f"the grammar cannot be read: {error}") from error


AnswerForm: TypeAlias = JsonForm | RegexForm | ChoiceForm | GrammarForm


def schema_of(form: AnswerForm | None) -> Mapping[str, Any] | None:
    """The schema that the client wrote; None if it asked for something else. Raises InvalidConstraint if it is nested
    too deep.
    """
    if not isinstance(form, JsonForm) or form.schema is ANY_OBJECT:
        return None
    check_nesting(form.schema, form.field)
    return form.schema


def json_rule(schema: Mapping[str, Any], lenient: bool) -> str:
    """Raises InvalidConstraint if the schema has numbers that would be enforced as others."""
    check_exact(schema)
    options = {"whitespace_pattern": WHITESPACE, "lenient": lenient}
    return "%json " + msgspec.json.encode({**schema, "x-guidance": options}).decode()


def compiles(expression: str) -> bool:
    """Whether a schema may have this regular expression as a pattern."""
    try:
        check_grammar(f"start: {json_rule({'type': 'string', 'pattern': expression}, lenient=False)}")
    except InvalidConstraint:
        return False
    return True


def literal(text: str) -> str:
    """Text quoted for Lark, which has the same quoting as JSON."""
    return json.dumps(text, ensure_ascii=False)
