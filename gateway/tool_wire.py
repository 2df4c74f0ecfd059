"""Tools, tool calls and results in the protos that clients send and read."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from deepmesh.v1 import gateway_pb2

from gateway.json_cost import check_decoding
from gateway.prompts.turns import ChatMessage
from gateway.requests import validate_message_count
from gateway.tools import Tool, Toolbox, ToolCall, ToolCallDelta, check_tool_count
from mesh.errors import InvalidRequest


def toolbox(chat: gateway_pb2.Chat) -> Toolbox | None:
    """The tools that the model may call; None if it may call none. The caller must still pass it to `check_toolbox`."""
    mode, named = chat.tool_choice.mode, chat.tool_choice.name or None
    if mode not in gateway_pb2.ToolChoiceMode.values():
        field = "chat.tool_choice.mode"
        raise InvalidRequest(f"{field} is {mode}: expected a ToolChoiceMode that this version knows", field=field)
    required = mode == gateway_pb2.TOOL_CHOICE_MODE_REQUIRED
    if not chat.tools:
        if required or named is not None:
            raise InvalidRequest("tool_choice needs tools: send them, or leave it out", field="chat.tool_choice")
        return None
    check_tool_count(len(chat.tools))
    check_decoding((tool.parameters_json for tool in chat.tools), "tools")
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(chat.tools)]
    if mode == gateway_pb2.TOOL_CHOICE_MODE_NONE and named is None:
        return None
    return Toolbox(tools, required=required, named=named, parallel=not chat.single_tool_call)


def chat_messages(messages: Sequence[gateway_pb2.ChatMessage]) -> list[ChatMessage]:
    """The chat's messages. Raises InvalidRequest if there are too many."""
    validate_message_count(len(messages), field="messages")
    validate_message_count(len(messages) + sum(len(message.tool_calls) for message in messages), field="messages")
    return [_chat_message(message) for message in messages]


def _chat_message(message: gateway_pb2.ChatMessage) -> ChatMessage:
    calls = [ToolCall(call.id, call.name, call.arguments_json) for call in message.tool_calls]
    return ChatMessage(
        message.role,
        message.content,
        calls,
        message.tool_call_id or None,
        name=message.name or None,
        reasoning=message.reasoning or None,
    )


def call_deltas(deltas: Iterable[ToolCallDelta]) -> list[gateway_pb2.ToolCallDelta]:
    return [
        gateway_pb2.ToolCallDelta(index=delta.index, id=delta.id, name=delta.name, arguments_json=delta.arguments)
        for delta in deltas
    ]


def _tool(tool: gateway_pb2.Tool, place: str) -> Tool:
    try:
        parameters = msgspec.json.decode(tool.parameters_json or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        field = f"{place}.parameters_json"
        raise InvalidRequest(f"{field} is not a JSON object: {error}", field=field) from error
    return Tool(tool.name, tool.description, parameters, tool.strict, place, "parameters_json")
