"""Forms of answers in the protos that clients send."""

from typing import Any

import msgspec
from deepmesh.v1 import gateway_pb2

from gateway.forms.answer_forms import ANY_OBJECT, AnswerForm, ChoiceForm, GrammarForm, JsonForm, RegexForm
from gateway.json_cost import check_decoding
from mesh.errors import InvalidConstraint


def answer_form(form: gateway_pb2.AnswerForm) -> AnswerForm:
    """Raises InvalidConstraint."""
    kind = form.WhichOneof("form")
    field = f"form.{kind}"
    match kind:
        case "json_schema":
            check_decoding([form.json_schema], field, InvalidConstraint)
            try:
                return JsonForm(msgspec.json.decode(form.json_schema, type=dict[str, Any]), field)
            except (msgspec.DecodeError, RecursionError) as error:
                raise InvalidConstraint(f"{field} is not a JSON object: {error}", field=field) from error
        case "json_object":
            return JsonForm(ANY_OBJECT, field)
        case "regex":
            return RegexForm(form.regex, field)
        case "choice":
            return ChoiceForm(list(form.choice.texts), field)
        case "grammar":
            return GrammarForm(form.grammar, field)
    raise InvalidConstraint("the form is empty: set one, or leave it out", field="form")
