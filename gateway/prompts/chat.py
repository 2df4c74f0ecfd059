"""Turns chat messages into a prompt, with the checkpoint's own template, or with the encoding that it has instead."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from gateway.prompts.control_text import strings_in
from gateway.prompts.deepseek_v32 import ARCHITECTURE, DeepSeekV32
from gateway.prompts.jinja_template import JinjaTemplate
from gateway.prompts.template_skills import TemplateSkills
from gateway.prompts.tokenizer import Tokenizer
from gateway.prompts.turns import ChatMessage, Turns
from gateway.requests import validate_text
from gateway.text.reasoning import THINK_CLOSE, THINK_OPEN, ReasoningStart
from gateway.tool_formats.interface import ToolReading
from gateway.tools import Toolbox
from mesh.domain.architectures import find_architecture
from mesh.errors import CheckpointError, ConfigError, InvalidRequest
from mesh.text_files import read_text

ROLES = ("system", "developer", "user", "assistant", "tool")
TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "config.json"


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


class PromptWriter(Protocol):
    """Writes chats as a model reads them."""

    skills: TemplateSkills

    def write(self, variables: Mapping[str, Any]) -> str:
        """The prompt of a chat. Raises InvalidRequest if there can be none."""
        ...


class ChatTemplate:
    """How a checkpoint's chats become prompts.

    Only the writer can write control tokens: in a client's text theirs is ordinary text.
    """

    def __init__(self, writer: PromptWriter, tokenizer: Tokenizer) -> None:
        self._writer = writer
        self._tokenizer = tokenizer

    def render(
        self,
        messages: Sequence[ChatMessage],
        options: TemplateOptions = DEFAULT_OPTIONS,
        toolbox: Toolbox | None = None,
        answer_schema: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """The prompt that asks the model for the next message. Raises InvalidRequest if the template refuses the
        messages.

        toolbox: must have passed `check_toolbox`. answer_schema: that the answer must match, for models that are told.

        If a tool must be called, the prompt ends inside the call, and the model continues with the name or the
        arguments.
        """
        _validate(messages)
        skills = self._writer.skills
        turns = Turns(messages, toolbox, answer_schema, skills, self._tokenizer.control_starts)
        text = self._writer.write({**turns.variables(), **options.variables()})
        opened, closed = (text.rstrip().endswith(tag) for tag in (THINK_OPEN, THINK_CLOSE))
        reasoning = ReasoningStart.OPEN if opened else ReasoningStart.POSSIBLE
        begun = ""
        if toolbox is not None and (toolbox.required or toolbox.named is not None):
            earlier = sum(len(message.tool_calls) for message in messages)
            begun = skills.format.opening(toolbox.forced_name, earlier)
            text += skills.format.reasoning_end + begun if opened else begun
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
        return ToolReading(self._writer.skills.format, toolbox.parallel, begun, schemas)


def find_chat_template(directory: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The checkpoint's template, from its own file or from tokenizer_config.json; without one, the encoding of models
    that have one instead. None if it takes no chats. Raises ConfigError if a file cannot be read.
    """
    source = _source_of(directory, tokenizer)
    if source is not None:
        return ChatTemplate(JinjaTemplate(source, tokenizer), tokenizer)
    if _architecture(directory) == ARCHITECTURE:
        return ChatTemplate(DeepSeekV32(tokenizer), tokenizer)
    return None


def _source_of(directory: Path, tokenizer: Tokenizer) -> str | None:
    path = directory / TEMPLATE_FILE
    if path.is_file():
        return _source_in(path)
    source = tokenizer.settings.get("chat_template")
    if isinstance(source, list):
        named = (entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default")
        source = next(named, {}).get("template")
    return source if isinstance(source, str) else None


def _architecture(directory: Path) -> str | None:
    """The model's, as config.json names it; None if the directory has only a tokenizer, or a model of others."""
    path = directory / CONFIG_FILE
    try:
        return find_architecture(msgspec.json.decode(read_text(path), type=dict[str, Any])).name
    except (FileNotFoundError, CheckpointError):
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


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
