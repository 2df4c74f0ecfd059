"""Turns chat messages into a prompt, with the checkpoint's own template, in a sandbox."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta

from gateway.control_text import strings_in
from gateway.reasoning import THINK_CLOSE, THINK_OPEN, ReasoningStart
from gateway.requests import validate_text
from gateway.template_environment import template_environment
from gateway.template_skills import TemplateSkills
from gateway.tokenizer import Tokenizer
from gateway.tool_formats.interface import ToolReading
from gateway.tools import Toolbox
from gateway.turns import ChatMessage, Turns
from mesh.errors import ConfigError, InvalidRequest
from mesh.text_files import read_text

ROLES = ("system", "user", "assistant", "tool")
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FAULTS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """Variables that a template may use; None leaves one undefined."""

    # Whether the model is to reason, for models that can also answer without.
    thinking: bool | None = None
    reasoning_effort: str | None = None

    def variables(self) -> dict[str, Any]:
        named = {
            "thinking": self.thinking,
            "enable_thinking": self.thinking,
            "reasoning_effort": self.reasoning_effort,
        }
        return {name: value for name, value in named.items() if value is not None}


DEFAULT_OPTIONS = TemplateOptions()


@dataclass(frozen=True, slots=True)
class RenderedChat:
    token_ids: list[int]
    reasoning: ReasoningStart
    # False if the client or the prompt says that there is no reasoning. The model may open a reasoning block even so.
    wants_reasoning: bool = True
    # Whether the prompt ends with the tag that ends reasoning.
    closed: bool = False
    # None if the answer calls no tools.
    tools: ToolReading | None = None


class ChatTemplate:
    """A checkpoint's chat template.

    Only the template itself can write control tokens: in a client's text theirs is ordinary text.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, clock: Callable[[], datetime] = datetime.now) -> None:
        """clock: the local time, for templates that write it into a prompt."""
        environment = template_environment(clock)
        try:
            self._template = environment.from_string(source)
            variables = meta.find_undeclared_variables(environment.parse(source))
        except TemplateSyntaxError as error:
            raise ConfigError(f"the chat template does not parse: line {error.lineno}: {error.message}") from error
        self._tokenizer = tokenizer
        self._skills = TemplateSkills.of(source, variables, self._run, tokenizer.control_id)

    def render(
        self,
        messages: Sequence[ChatMessage],
        options: TemplateOptions = DEFAULT_OPTIONS,
        toolbox: Toolbox | None = None,
    ) -> RenderedChat:
        """The prompt that asks the model for the next message. Raises InvalidRequest if the template refuses the
        messages.

        toolbox: must have passed `check_toolbox`.

        If a tool must be called, the prompt ends inside the call, and the model continues with the name or the
        arguments.
        """
        _validate(messages)
        turns = Turns(messages, toolbox, self._skills, self._tokenizer.control_starts)
        text = self._run({**turns.variables(), **options.variables()})
        opened, closed = (text.rstrip().endswith(tag) for tag in (THINK_OPEN, THINK_CLOSE))
        reasoning = ReasoningStart.OPEN if opened else ReasoningStart.POSSIBLE
        begun = ""
        if toolbox is not None and (toolbox.required or toolbox.named is not None):
            earlier = sum(len(message.tool_calls) for message in messages)
            begun = self._skills.format.opening(toolbox.forced_name, earlier)
            text += f"\n{THINK_CLOSE}\n\n{begun}" if opened else begun
            reasoning, closed = ReasoningStart.NONE, False
        return RenderedChat(
            token_ids=turns.shield.encode(text, self._tokenizer),
            reasoning=reasoning,
            wants_reasoning=opened or not (options.thinking is False or closed),
            closed=closed,
            tools=None if toolbox is None else self._reading(toolbox, begun),
        )

    def _reading(self, toolbox: Toolbox, begun: str) -> ToolReading:
        schemas = {tool.name: tool.parameters for tool in toolbox.tools}
        return ToolReading(self._skills.format, toolbox.parallel, begun, schemas)

    def _run(self, variables: dict[str, Any]) -> str:
        try:
            return self._template.render(
                add_generation_prompt=True,
                documents=None,
                bos_token=self._tokenizer.beginning or "",
                eos_token=self._tokenizer.end or "",
                **variables,
            )
        # A template is a program. Whatever its expressions raise for these messages counts as the request's fault.
        except TEMPLATE_FAULTS as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", field="messages") from error


def find_chat_template(directory: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The checkpoint's template, from its own file or from tokenizer_config.json; None if it has none. Raises
    ConfigError if the file cannot be read.
    """
    path = directory / TEMPLATE_FILE
    if path.is_file():
        return ChatTemplate(_source_in(path), tokenizer)
    source = tokenizer.settings.get("chat_template")
    if isinstance(source, list):
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    return ChatTemplate(source, tokenizer) if isinstance(source, str) else None


def _source_in(path: Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _validate(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise InvalidRequest("there is no message: send at least one", field="messages")
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        if message.role not in ROLES:
            roles = ", ".join(ROLES)
            raise InvalidRequest(f"unknown role {message.role!r}: use one of {roles}", field=f"{field}.role")
        validate_text(message.content, field=f"{field}.content")
        for number, call in enumerate(message.tool_calls):
            validate_text(call.name + call.arguments, field=f"{field}.tool_calls[{number}].function")
        validate_text("".join(strings_in(message)), field=field)
        if message.tool_calls and message.role != "assistant":
            raise InvalidRequest("only an assistant calls tools", field=f"{field}.tool_calls")
