"""Chat templates with the habits of published ones, each about calls, and chats as clients send them."""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

# DeepSeek-V3 and R1 as first published: calls only where the content is None, content only where it is not.
CONTENT_OR_CALLS = """
{%- for m in messages -%}
  {%- if m['role'] == 'user' -%}{{ '<｜User｜>' + m['content'] }}{%- endif -%}
  {%- if m['role'] == 'assistant' and m['content'] is none -%}
    {%- for call in m['tool_calls'] -%}
{{ '<｜tool▁calls▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] }}
{{ '```json\\n' + call['function']['arguments'] + '\\n```<｜tool▁calls▁end｜>' }}
    {%- endfor -%}
  {%- endif -%}
  {%- if m['role'] == 'assistant' and m['content'] is not none -%}
{{ '<｜Assistant｜>' + m['content'].split('</think>')[-1] + eos_token }}
  {%- endif -%}
  {%- if m['role'] == 'tool' -%}{{ '<｜tool▁output▁begin｜>' + m['content'] }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<｜Assistant｜><think>\\n' }}{%- endif -%}
"""
# DeepSeek-R1-0528: content is searched before anything asks whether it is None.
CONTENT_IS_TEXT = """
{%- for m in messages -%}
  {%- set content = m['content'] -%}
  {%- if m['role'] == 'assistant' and '</think>' in content -%}
    {%- set content = content.split('</think>')[-1] -%}
  {%- endif -%}
{{ m['role'] + ':' + content }}
  {%- if m['tool_calls'] is defined and m['tool_calls'] is not none -%}
    {%- for call in m['tool_calls'] -%}
{{ '<｜tool▁call▁begin｜>' + call['function']['name'] + '```json' + call['function']['arguments'] + '```' }}
    {%- endfor -%}
  {%- endif -%}
{%- endfor -%}
"""
# Kimi K2, and the tool templates that others ship for DeepSeek's models: tools and ids are written as they come.
TOOLS_AS_JSON = """
{%- if tools -%}<|tools|>{{ tools | tojson }}{%- endif -%}
{%- for m in messages -%}
<|{{ m.get('name') or m['role'] }}|>{{ m['content'] }}
  {%- for call in m.get('tool_calls') or [] -%}
<|call|>{{ call['id'] }}<|with|>{{ call['function']['name'] }}{{ call['function']['arguments'] | tojson }}
  {%- endfor -%}
  {%- if m['role'] == 'tool' -%}<|of|>{{ m['tool_call_id'] }}{%- endif -%}
{%- endfor -%}
"""
# GLM 4.5 and later: arguments by key, and reasoning after the last question.
ARGUMENTS_BY_KEY = """
{%- for tool in tools or [] %}
{{ tool | tojson(ensure_ascii=False, indent=2, separators=(',', ':')) }}
{%- endfor %}
{%- for m in messages -%}
<|{{ m.role }}|>
  {%- if m.reasoning_content is string -%}<think>{{ m.reasoning_content.strip() }}</think>{%- endif -%}
  {% generation %}{{ m.content }}{% endgeneration %}
  {%- for call in m.tool_calls or [] -%}
<tool_call>{{ call.function.name }}
    {%- for key, value in call.function.arguments.items() -%}
      {%- if loop.index0 > 99 -%}{% break %}{%- endif -%}
<arg_key>{{ key }}</arg_key><arg_value>{{ value | tojson if value is not string else value }}</arg_value>
    {%- endfor -%}
  {%- endfor -%}
{%- endfor -%}
"""


@dataclass(frozen=True)
class Habit:
    """A template, and the form in which its model's own users give it turns with calls."""

    source: str
    # The content of a turn that has only calls.
    no_text: str | None = ""
    # Whether arguments are given as an object.
    decoded: bool = False
    # Whether a turn with text and calls is given as two.
    apart: bool = False


HABITS = {
    "content-or-calls": Habit(CONTENT_OR_CALLS, no_text=None, apart=True),
    "content-is-text": Habit(CONTENT_IS_TEXT),
    "tools-as-json": Habit(TOOLS_AS_JSON, decoded=True),
    "arguments-by-key": Habit(ARGUMENTS_BY_KEY, decoded=True),
}

TEXT = st.text("abc ü\n\"\\<>{}'🤖\U000f0001", max_size=8)
NAME = st.text("abc_", min_size=1, max_size=5)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(TEXT, VALUE, max_size=3)
FUNCTION = st.fixed_dictionaries(
    {"name": NAME},
    optional={"description": TEXT, "strict": st.booleans(), "parameters": st.dictionaries(TEXT, VALUE, max_size=3)},
)
TOOL = FUNCTION.map(lambda function: {"type": "function", "function": function})


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Chats in OpenAI's form, whose calls have decoded arguments."""
    chat: list[dict[str, Any]] = [{"role": "user", "content": draw(TEXT)}]
    for number in range(draw(st.integers(0, 2))):
        call = {"name": draw(NAME), "arguments": draw(ARGUMENTS)}
        calls = [{"id": f"call_{number}", "type": "function", "function": call}]
        chat.append({"role": "assistant", "content": draw(TEXT), "tool_calls": calls})
        if draw(st.booleans()):
            chat[-1] |= dict.fromkeys(("reasoning_content", "reasoning"), draw(TEXT))
        chat.append({"role": "tool", "content": draw(TEXT), "tool_call_id": f"call_{number}"})
        if draw(st.booleans()):
            chat += [{"role": "assistant", "content": draw(TEXT)}, {"role": "user", "content": draw(TEXT)}]
    return chat
