"""How clients of OpenAI, vLLM and SGLang ask for answers of a given form."""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from gateway.forms.answer_forms import ANY_OBJECT, AnswerForm, ChoiceForm, GrammarForm, JsonForm, RegexForm
from gateway.json_cost import check_decoding
from gateway.openai.unsupported import Refused
from mesh.errors import InvalidConstraint, InvalidRequest, MissingField


class JsonSchemaFormat(Struct, forbid_unknown_fields=True):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    # Whether to refuse a schema if a part of it cannot be enforced, rather than leave that part out.
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def form(self) -> AnswerForm | None:
        name = "response_format"
        if self.type == "text":
            return None
        if self.type == "json_object":
            return JsonForm(ANY_OBJECT, name)
        if self.json_schema is None:
            raise MissingField(f"{name} of type json_schema lacks its json_schema", field=f"{name}.json_schema")
        schema = ANY_OBJECT if self.json_schema.schema is None else self.json_schema.schema
        return JsonForm(schema, f"{name}.json_schema.schema", lenient=not self.json_schema.strict)


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    json_schema: dict[str, Any] | str | None = field(default=None, name="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class ConstraintFields(Refused, kw_only=True):
    """A request may have at most one of these fields."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # SGLang's names.
    regex: str | None = None
    ebnf: str | None = None

    def form(self) -> AnswerForm | None:
        """Raises InvalidRequest."""
        forms = list(self._forms())
        if len(forms) > 1:
            names = " and ".join(form.field for form in forms)
            raise InvalidRequest(f"{names} exclude each other: send one", field=forms[1].field)
        return forms[0] if forms else None

    def _forms(self) -> Iterator[AnswerForm]:
        if self.response_format is not None and (asked := self.response_format.form()) is not None:
            yield asked
        outputs = self.structured_outputs or StructuredOutputs()
        for name, schema in (("structured_outputs.json", outputs.json_schema), ("guided_json", self.guided_json)):
            if schema is not None:
                yield JsonForm(_schema(schema, name), name)
        if outputs.json_object:
            yield JsonForm(ANY_OBJECT, "structured_outputs.json_object")
        patterns = {
            "structured_outputs.regex": outputs.regex,
            "guided_regex": self.guided_regex,
            "regex": self.regex,
        }
        yield from (RegexForm(pattern, name) for name, pattern in patterns.items() if pattern is not None)
        choices = {"structured_outputs.choice": outputs.choice, "guided_choice": self.guided_choice}
        yield from (ChoiceForm(texts, name) for name, texts in choices.items() if texts is not None)
        grammars = {
            "structured_outputs.grammar": outputs.grammar,
            "guided_grammar": self.guided_grammar,
            "ebnf": self.ebnf,
        }
        yield from (GrammarForm(text, name) for name, text in grammars.items() if text is not None)


def _schema(given: dict[str, Any] | str, name: str) -> dict[str, Any]:
    """The schema as an object; vLLM's clients may send it as text."""
    if isinstance(given, dict):
        return given
    check_decoding([given], name, InvalidConstraint)
    try:
        return msgspec.json.decode(given, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidConstraint(f"{name} is not a JSON object: {error}", field=name) from error
