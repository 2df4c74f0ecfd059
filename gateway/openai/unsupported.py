"""What OpenAI's clients may send that changes nothing here, or that we refuse."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

from msgspec import Struct

from mesh.errors import Unsupported


class Accepted(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that are for the service's own books at OpenAI's: no answer depends on them."""

    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None


class Refused(Accepted, kw_only=True):
    """Features that we lack, each with the values that ask for nothing."""

    add_generation_prompt: Annotated[Any, (None, True)] = None
    allowed_token_ids: Annotated[Any, (None, [])] = None
    audio: Annotated[Any, (None,)] = None
    bad_words: Annotated[Any, (None, [])] = None
    best_of: Annotated[Any, (None, 1)] = None
    continue_final_message: Annotated[Any, (None, False)] = None
    echo: Annotated[Any, (None, False)] = None
    function_call: Annotated[Any, (None, "none", "auto")] = None
    functions: Annotated[Any, (None, [])] = None
    grammar: Annotated[Any, (None,)] = None
    guided_choice: Annotated[Any, (None,)] = None
    guided_grammar: Annotated[Any, (None,)] = None
    guided_json: Annotated[Any, (None,)] = None
    guided_regex: Annotated[Any, (None,)] = None
    length_penalty: Annotated[Any, (None, 1)] = None
    min_tokens: Annotated[Any, (None, 0)] = None
    modalities: Annotated[Any, (None, ["text"])] = None
    n: Annotated[Any, (None, 1)] = None
    parallel_tool_calls: Annotated[Any, (None, True, False)] = None
    prediction: Annotated[Any, (None,)] = None
    priority: Annotated[Any, (None, 0)] = None
    prompt_logprobs: Annotated[Any, (None,)] = None
    regex: Annotated[Any, (None,)] = None
    response_format: Annotated[Any, (None, {"type": "text"})] = None
    skip_special_tokens: Annotated[Any, (None, True)] = None
    spaces_between_special_tokens: Annotated[Any, (None, True)] = None
    store: Annotated[Any, (None, False)] = None
    structured_outputs: Annotated[Any, (None,)] = None
    suffix: Annotated[Any, (None, "")] = None
    tool_choice: Annotated[Any, (None, "none", "auto")] = None
    tools: Annotated[Any, (None, [])] = None
    use_beam_search: Annotated[Any, (None, False)] = None
    verbosity: Annotated[Any, (None, "medium")] = None
    web_search_options: Annotated[Any, (None,)] = None

    def refuse(self) -> None:
        """Raises Unsupported naming the first one that asks for something."""
        for name, harmless in _HARMLESS.items():
            if getattr(self, name) not in harmless:
                raise Unsupported(f"{name} is not supported: leave it out", field=name)


_HARMLESS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        name: hint.__metadata__[0]
        for name, hint in get_type_hints(Refused, include_extras=True).items()
        if name not in Accepted.__struct_fields__ and not name.startswith("__")
    }
)
