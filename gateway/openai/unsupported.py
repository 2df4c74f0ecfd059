"""Features that clients of the chat and completion endpoints may ask for and that we lack."""

from typing import Annotated, Any

from gateway.openai.accepted import harmless
from gateway.openai.request_body import RequestBody


class Refused(RequestBody, kw_only=True):
    """Features that we lack, each with the values that ask for nothing."""

    add_generation_prompt: Annotated[Any, harmless(None, True)] = None
    allowed_token_ids: Annotated[Any, harmless(None, [])] = None
    audio: Annotated[Any, harmless(None)] = None
    best_of: Annotated[Any, harmless(None, 1, why="completions have it, chats do not")] = None
    continue_final_message: Annotated[Any, harmless(None, False)] = None
    echo: Annotated[Any, harmless(None, False)] = None
    function_call: Annotated[Any, harmless(None, "none", "auto")] = None
    functions: Annotated[Any, harmless(None, [])] = None
    grammar: Annotated[Any, harmless(None)] = None
    length_penalty: Annotated[Any, harmless(None, 1)] = None
    modalities: Annotated[Any, harmless(None, ["text"])] = None
    parallel_tool_calls: Annotated[Any, harmless(None, True, False)] = None
    prediction: Annotated[Any, harmless(None)] = None
    skip_special_tokens: Annotated[Any, harmless(None, True)] = None
    spaces_between_special_tokens: Annotated[Any, harmless(None, True)] = None
    store: Annotated[Any, harmless(None, False)] = None
    suffix: Annotated[Any, harmless(None, "", why="the models only continue texts")] = None
    tool_choice: Annotated[Any, harmless(None, "none", "auto")] = None
    tools: Annotated[Any, harmless(None, [])] = None
    use_beam_search: Annotated[Any, harmless(None, False)] = None
    verbosity: Annotated[Any, harmless(None, "medium")] = None
    web_search_options: Annotated[Any, harmless(None)] = None
