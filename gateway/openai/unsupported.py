"""What OpenAI's clients may send that changes nothing here, or that we refuse."""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, get_type_hints

from msgspec import Meta, Struct

from mesh.errors import Unsupported


class Accepted(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that are for the service's own books at OpenAI's: no answer depends on them."""

    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None


def harmless(*values: object) -> Meta:
    """Marks a feature that we lack with the values that ask for nothing, for clients that read our schema as well."""
    return Meta(extra_json_schema={"enum": list(values)})


class Refused(Accepted, kw_only=True):
    """Features that we lack, each with the values that ask for nothing."""

    add_generation_prompt: Annotated[Any, harmless(None, True)] = None
    allowed_token_ids: Annotated[Any, harmless(None, [])] = None
    audio: Annotated[Any, harmless(None)] = None
    best_of: Annotated[Any, harmless(None, 1)] = None
    continue_final_message: Annotated[Any, harmless(None, False)] = None
    echo: Annotated[Any, harmless(None, False)] = None
    function_call: Annotated[Any, harmless(None, "none", "auto")] = None
    functions: Annotated[Any, harmless(None, [])] = None
    grammar: Annotated[Any, harmless(None)] = None
    length_penalty: Annotated[Any, harmless(None, 1)] = None
    modalities: Annotated[Any, harmless(None, ["text"])] = None
    parallel_tool_calls: Annotated[Any, harmless(None, True, False)] = None
    prediction: Annotated[Any, harmless(None)] = None
    prompt_logprobs: Annotated[Any, harmless(None)] = None
    skip_special_tokens: Annotated[Any, harmless(None, True)] = None
    spaces_between_special_tokens: Annotated[Any, harmless(None, True)] = None
    store: Annotated[Any, harmless(None, False)] = None
    suffix: Annotated[Any, harmless(None, "")] = None
    tool_choice: Annotated[Any, harmless(None, "none", "auto")] = None
    tools: Annotated[Any, harmless(None, [])] = None
    use_beam_search: Annotated[Any, harmless(None, False)] = None
    verbosity: Annotated[Any, harmless(None, "medium")] = None
    web_search_options: Annotated[Any, harmless(None)] = None

    def refuse(self) -> None:
        """Raises Unsupported naming the first one that asks for something."""
        for name, values in _harmless_values(type(self)).items():
            if getattr(self, name) not in values:
                raise Unsupported(f"{name} is not supported: leave it out", field=name)


@cache
def _harmless_values(kind: type[Refused]) -> Mapping[str, list[object]]:
    """By field; a subclass that supports a feature has a field of its own under that name."""
    hints = get_type_hints(kind, include_extras=True)
    marks = ((name, getattr(hint, "__metadata__", (None,))[0]) for name, hint in hints.items())
    return {
        name: mark.extra_json_schema["enum"]
        for name, mark in marks
        if isinstance(mark, Meta) and mark.extra_json_schema is not None
    }
