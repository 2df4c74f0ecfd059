"""The requests of the Responses API."""

from typing import Annotated, Any, Literal

from msgspec import Struct

from gateway.asks import Ask, ChatPrompt
from gateway.forms.answer_forms import ANY_OBJECT, AnswerForm, JsonForm
from gateway.openai.accepted import harmless
from gateway.openai.request_body import RequestBody
from gateway.openai.requests import TemplateFields, template_options
from gateway.openai.tools import toolbox
from gateway.requests import FieldNames
from gateway.responses.items import InputItem, messages_of
from gateway.responses.tools import AllowedTools, FunctionTool, NamedFunction, offered
from mesh.errors import MissingField, Unsupported

LOGPROBS = "message.output_text.logprobs"
# Accepted and ignored: encrypted reasoning is for services that hide it; our answers show it.
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")


class ReasoningFields(Struct, forbid_unknown_fields=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    # Accepted and ignored: clients get the reasoning itself, which is more than any summary.
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    # Whether to refuse a schema if a part of it cannot be enforced, rather than leave that part out.
    strict: bool | None = None

    def form(self) -> AnswerForm | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return JsonForm(ANY_OBJECT, "text.format")
        if self.schema is None:
            raise MissingField("a format of type json_schema lacks its schema", field="text.format.schema")
        return JsonForm(self.schema, "text.format.schema", lenient=not self.strict)


class TextFields(Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class EventOptions(Struct, forbid_unknown_fields=True):
    # Accepted and ignored: OpenAI pads events so that their lengths reveal nothing; we do not.
    include_obfuscation: bool | None = None


class ResponseRequest(RequestBody, kw_only=True):
    input: str | list[InputItem]
    instructions: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningFields | None = None
    text: TextFields | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: TemplateFields | None = None
    stream_options: EventOptions | None = None
    # Accepted and ignored: it bounds calls of tools that a service provides itself, and we provide none.
    max_tool_calls: int | None = None
    background: Annotated[Any, harmless(None, False)] = None
    context_management: Annotated[Any, harmless(None, [])] = None
    conversation: Annotated[Any, harmless(None, why="go on from a response by previous_response_id")] = None
    moderation: Annotated[Any, harmless(None)] = None
    # Continue the conversation of this response of the same API key. Its instructions are not carried over.
    previous_response_id: str | None = None
    prompt: Annotated[Any, harmless(None)] = None
    # Whether to keep the response for GET and previous_response_id; by default it is kept if the gateway can.
    store: bool | None = None
    truncation: Annotated[Any, harmless(None, "disabled")] = None

    @property
    def with_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def asks(self, request_id: str) -> list[Ask]:
        for index, name in enumerate(self.include or ()):
            if name not in INCLUDABLE:
                raise Unsupported(f"{name!r} cannot be included: leave it out", field=f"include[{index}]")
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise Unsupported("verbosity is not supported: leave it out", field="text.verbosity")
        format = None if self.text is None else self.text.format
        return [
            Ask(
                request_id=request_id,
                model=self.model,
                prompt=self._prompt(),
                sampling=self.sampling((self.top_logprobs or 0) if self.with_logprobs else None),
                max_tokens=self.max_output_tokens,
                names=FieldNames("input", "max_output_tokens", has_messages=False),
                stop_strings=(),
                stop_token_ids=(),
                ignore_eos=False,
                cache_salt=self.cache_salt,
                priority=self.priority or 0,
                sparse_prefill=self.sparse_prefill,
                form=None if format is None else format.form(),
            )
        ]

    def _prompt(self) -> ChatPrompt:
        effort = None if self.reasoning is None else self.reasoning.effort
        options = template_options(self.chat_template_kwargs, effort)
        choice = self.tool_choice.to_choice() if isinstance(self.tool_choice, Struct) else self.tool_choice
        tools = toolbox(offered(self.tools or ()), choice, self.parallel_tool_calls)
        return ChatPrompt(messages_of(self.instructions, self.input), options, tools)
