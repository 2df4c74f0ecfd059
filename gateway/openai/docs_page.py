"""Renders the OpenAPI document as one page, without scripts or resources from other hosts."""

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{ api.info.title }} {{ api.info.version }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code { background: #8882; padding: 0 .3em } td, th { text-align: left; vertical-align: top; padding-right: 2em }
</style>
<h1>{{ api.info.title }} {{ api.info.version }}</h1>
<p>The same for programs: <a href="openapi.json">openapi.json</a></p>
{% for path, methods in api.paths.items() %}{% for method, operation in methods.items() %}
<h2><code>{{ method | upper }} {{ path }}</code></h2>
<p>{{ operation.summary }}</p>
{% if operation.requestBody %}
<p>Request: {{ shown(operation.requestBody.content["application/json"].schema) }}</p>{% endif %}
<p>Answer: {% for kind, content in operation.responses["200"].content.items() -%}
{{ shown(content.schema) }} as <code>{{ kind }}</code>{{ ", " if not loop.last }}{% endfor %}</p>
{% endfor %}{% endfor %}
{% for name, schema in api.components.schemas.items() %}
<h2 id="{{ name }}">{{ name }}</h2>
<p>{{ schema.description }}</p>
<table>{% for field, kind in schema.properties.items() %}
<tr><td><code>{{ field }}</code>{{ " (required)" if field in schema.required }}<td>{{ shown(kind) }}{% endfor %}</table>
{% endfor %}
</html>
"""


def docs_page(document: Mapping[str, Any]) -> str:
    environment = Environment(autoescape=True)
    return environment.from_string(PAGE).render(api=document, shown=shown)


def shown(schema: Mapping[str, Any]) -> str:
    """A type in words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return "one of " + ", ".join(map(repr, schema["enum"]))
    if "const" in schema:
        return repr(schema["const"])
    if "contentSchema" in (data := schema.get("properties", {}).get("data", {})):
        return f"events of {shown(data['contentSchema'])}"
    if "anyOf" in schema:
        return " or ".join(map(shown, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"list of {shown(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))
