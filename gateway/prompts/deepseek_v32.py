"""Chats as DeepSeek-V3.2 reads them. Instead of a chat template its checkpoints bring an encoding in code.

Source: the card and the examples of DeepSeek-V3.2 (`encoding/` in its repository), with which the tests compare.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.prompts.template_skills import CallStyle, Message, TemplateSkills
from gateway.prompts.tokenizer import Tokenizer
from gateway.text.reasoning import THINK_CLOSE, THINK_OPEN
from gateway.tool_formats.dsml import V32
from gateway.tool_formats.dsml_reader import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    LEAD,
    PARAMETER_BEGIN,
    PARAMETER_END,
)

ARCHITECTURE = "DeepseekV32ForCausalLM"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
QUESTIONS = ("user", "developer")
TOOLS = f"""## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "{CALLS_BEGIN}" block like the following as part of your reply to the user:
{CALLS_BEGIN}
{CALL_BEGIN}$FUNCTION_NAME">
{PARAMETER_BEGIN}$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE{PARAMETER_END}
...
{CALL_END}
{CALL_BEGIN}$FUNCTION_NAME2">
...
{CALL_END}
{CALLS_END}

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

{CALLS_BEGIN}
...
{CALLS_END}

<function_results>
...
</function_results>

{THINK_OPEN}...thinking about results{THINK_CLOSE}

Here are the functions available in JSONSchema format:
<functions>
"""
ANSWER = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


class DeepSeekV32:
    skills = TemplateSkills(
        tools=True,
        calls=CallStyle(no_text="", apart=False, decoded=True),
        format=V32,
        developers=True,
        schemas=True,
    )

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._beginning, self._end = tokenizer.beginning or "", tokenizer.end or ""

    def write(self, variables: Mapping[str, Any]) -> str:
        """The prompt. Of the variables it reads `messages`, `tools`, `answer_schema` and `thinking`."""
        messages = _with_roles(variables["messages"])
        notes = "".join(_notes(variables.get("tools") or (), variables.get("answer_schema")))
        if notes and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": ""})
        return self._beginning + "".join(self._turns(messages, notes, bool(variables.get("thinking"))))

    def _turns(self, messages: Sequence[Message], notes: str, thinking: bool) -> Iterator[str]:
        """What each message adds. Reasoning stands only after the last question: before it, all was answered."""
        asked = max((index for index, each in enumerate(messages) if each["role"] in QUESTIONS), default=0)
        outputs: list[str] = []
        for index, message in enumerate(messages):
            thinks = thinking and index >= asked
            content, thought = message["content"] or "", THINK_OPEN if thinks else THINK_CLOSE
            match message["role"]:
                case "system":
                    yield content + notes
                case "developer":
                    yield f"{USER}{notes}\n\n# The user's message is: {content}{ASSISTANT}{thought}"
                case "user":
                    yield f"{USER}{content}{ASSISTANT}{thought}"
                case "assistant":
                    yield self._answer(message, thinks)
                case "tool":
                    outputs.append(content)
                    if index + 1 == len(messages) or messages[index + 1]["role"] != "tool":
                        yield f"{V32.outputs(outputs)}{LEAD}{thought}"
                        outputs.clear()
            # Only the first message has them.
            notes = ""

    def _answer(self, message: Message, thinks: bool) -> str:
        content, reasoning = message["content"] or "", message.get("reasoning_content") or ""
        # Some clients send an answer back with its reasoning in the text.
        before, closed, after = content.rpartition(THINK_CLOSE)
        if closed:
            content, reasoning = after, reasoning or before.removeprefix(THINK_OPEN)
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = V32.written([(each["name"], each["arguments"]) for each in functions]) if functions else ""
        return f"{reasoning + THINK_CLOSE if thinks else ''}{content}{calls}{self._end}"


def _with_roles(messages: Sequence[Message]) -> list[Message]:
    """The model's developer asks and is answered, as a search agent; a developer to OpenAI's clients speaks before the
    user, as the system does.
    """
    following = [*(message["role"] for message in messages[1:]), "assistant"]
    return [
        {**message, "role": "system"} if message["role"] == "developer" and after != "assistant" else message
        for message, after in zip(messages, following, strict=True)
    ]


def _notes(tools: Sequence[Mapping[str, Any]], answer_schema: Mapping[str, Any] | None) -> Iterator[str]:
    """What the chat's first message says of tools and of the answer."""
    if tools:
        described = (json.dumps(tool["function"], ensure_ascii=False) + "\n" for tool in tools)
        yield f"\n\n{TOOLS}{''.join(described)}</functions>\n"
    if answer_schema is not None:
        yield f"\n\n{ANSWER}{json.dumps(answer_schema, ensure_ascii=False)}"
