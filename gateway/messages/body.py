"""The requests of the Messages API."""

from typing import Annotated, Any, Literal

from msgspec import Struct

from gateway.asks import Ask, ChatPrompt
from gateway.forms.answer_forms import AnswerForm, JsonForm
from gateway.messages.content import InputMessage, TextBlock, messages_of
from gateway.openai.accepted import harmless
from gateway.openai.request_body import RequestBody
from gateway.prompts.chat import TemplateOptions
from gateway.requests import FieldNames
from gateway.tools import Tool, Toolbox, check_tool_count
from mesh.errors import MissingField, Unsupported


class ToolParam(Struct, forbid_unknown_fields=True):
    """A function tool. Tools that Anthropic runs or defines itself have other types and are refused."""

    name: str
    # JSON schema of the arguments.
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    # Accepted and ignored: arguments always stream as they come.
    eager_input_streaming: bool | None = None


class ToolChoice(Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    # Set if the type is "tool".
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, forbid_unknown_fields=True):
    type: Literal["enabled", "adaptive", "disabled"]
    # Accepted and ignored: only max_tokens bounds how long a model thinks.
    budget_tokens: int | None = None
    # Accepted and ignored: the client gets the reasoning itself, which is more than a summary.
    display: Literal["summarized"] | None = None


class JsonFormat(Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class PromptBody(RequestBody, kw_only=True):
    """The fields of a request that make its prompt: enough to count its tokens."""

    messages: list[InputMessage]
    system: str | list[TextBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    container: Annotated[Any, harmless(None)] = None
    context_management: Annotated[Any, harmless(None)] = None
    mcp_servers: Annotated[Any, harmless(None, [])] = None
    speed: Annotated[Any, harmless(None, "standard")] = None

    def asks(self, request_id: str) -> list[Ask]:
        """A prompt by itself asks for no answer."""
        return []

    def prompt(self) -> ChatPrompt:
        # If a request does not mention thinking, Anthropic's models do not think, and clients expect text first.
        thinking = self.thinking is not None and self.thinking.type != "disabled"
        effort = None if self.output_config is None else self.output_config.effort
        options = TemplateOptions(thinking, effort if thinking else None)
        return ChatPrompt(messages_of(self.system, self.messages), options, self._toolbox())

    def form(self) -> AnswerForm | None:
        if self.output_config is None or self.output_config.format is None:
            return None
        return JsonForm(self.output_config.format.schema, "output_config.format.schema")

    def _toolbox(self) -> Toolbox | None:
        check_tool_count(len(self.tools or ()))
        choice = self.tool_choice or ToolChoice("auto")
        tools = [_tool(tool, index) for index, tool in enumerate(self.tools or ())]
        if choice.type == "none" or not (tools or choice.type in ("any", "tool")):
            return None
        if choice.type == "tool" and choice.name is None:
            raise MissingField("tool_choice of type tool lacks the tool's name", field="tool_choice.name")
        return Toolbox(
            tools,
            required=choice.type == "any",
            named=choice.name if choice.type == "tool" else None,
            parallel=not choice.disable_parallel_tool_use,
        )


class MessageRequest(PromptBody, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None

    def asks(self, request_id: str) -> list[Ask]:
        return [
            Ask(
                request_id=request_id,
                model=self.model,
                prompt=self.prompt(),
                sampling=self.sampling(None),
                max_tokens=self.max_tokens,
                names=FieldNames("messages"),
                stop_strings=tuple(self.stop_sequences or ()),
                stop_token_ids=(),
                ignore_eos=False,
                cache_salt=self.cache_salt,
                priority=self.priority or 0,
                sparse_prefill=self.sparse_prefill,
                form=self.form(),
            )
        ]


def _tool(tool: ToolParam, index: int) -> Tool:
    place = f"tools[{index}]"
    if tool.type not in (None, "custom"):
        raise Unsupported(f"tools of type {tool.type!r} are not supported", field=f"{place}.type")
    schema = tool.input_schema or {}
    return Tool(tool.name, tool.description or "", schema, bool(tool.strict), place, "input_schema")
