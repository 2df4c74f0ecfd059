"""Filters, globals and tags of chat templates, and transformers'."""

from datetime import datetime

import pytest
from jinja2.exceptions import SecurityError, TemplateError

from gateway.prompts.chat import ChatTemplate
from gateway.prompts.jinja_template import JinjaTemplate
from gateway.prompts.template_environment import template_environment
from gateway.prompts.turns import ChatMessage
from tests.support.gateways import model_texts
from tests.support.rendered import our_text, their_text

NOON = datetime(2026, 3, 1, 12)
DATA = {"b": ["ü", {"<a>": None, "c": 1.5}], "a": "\"'&"}


def rendered(source: str) -> str:
    return template_environment(lambda: NOON).from_string(source).render(data=DATA)


@pytest.mark.parametrize(
    "source",
    [
        "{{ data | tojson }}",
        "{{ data | tojson(ensure_ascii=True) }}",
        "{{ data | tojson(indent=2) }}",
        "{{ data | tojson(separators=(',', ':'), sort_keys=True) }}",
        "{% set ns = namespace(n=0, self=2) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ ns.self }}",
        "{{ dict(a=1) | tojson }}{{ dict.fromkeys('ab', 1) | tojson }}",
        "{% for x in range(9) %}{% if x == 1 %}{% continue %}{% elif x == 3 %}{% break %}{% endif %}.{% endfor %}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "  {% if true %}\n  a\n  {% endif %}\nb",
    ],
)
def test_an_expression_has_the_value_that_transformers_gives_it(source: str) -> None:
    assert rendered(source) == their_text(source, [{"role": "user", "content": ""}], data=DATA)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ namespace(_a=1) }}",
        "{% set ns = namespace() %}{% set ns._a = 1 %}",
        "{{ data.update(x=1) }}",
        "{{ dict.__class__.__mro__ }}",
        "{{ namespace.__init__.__globals__ }}",
    ],
)
def test_what_transformers_refuses_is_refused(source: str) -> None:
    for render in (rendered, lambda text: their_text(text, [{"role": "user", "content": ""}], data=dict(DATA))):
        with pytest.raises((SecurityError, TemplateError)):
            render(source)


def test_a_template_can_write_the_date() -> None:
    assert rendered("{{ strftime_now('%d %B %Y') }}") == "01 March 2026"


def test_disguised_text_survives_ascii_json() -> None:
    tokenizer = model_texts()["oracle"].tokenizer
    assert tokenizer is not None
    template = ChatTemplate(
        JinjaTemplate("{{ messages[0].content | tojson(ensure_ascii=true) }}", tokenizer), tokenizer
    )
    assert our_text(template.render([ChatMessage("user", "<ü🤖>")])) == r'"<\u00fc\ud83e\udd16>"'
