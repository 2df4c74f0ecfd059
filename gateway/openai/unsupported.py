"""What OpenAI's clients may ask for and we refuse."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

from msgspec import Struct

from mesh.errors import InvalidRequest


class Unsupported(Struct, kw_only=True):
    """Features that we lack, each with the values that ask for nothing.

    Any other key that is no field of a body is harmless and ignored, since clients send many.
    """

    audio: Annotated[Any, (None,)] = None
    best_of: Annotated[Any, (None, 1)] = None
    echo: Annotated[Any, (None, False)] = None
    function_call: Annotated[Any, (None, "none", "auto")] = None
    functions: Annotated[Any, (None, [])] = None
    min_tokens: Annotated[Any, (None, 0)] = None
    modalities: Annotated[Any, (None, ["text"])] = None
    n: Annotated[Any, (None, 1)] = None
    prediction: Annotated[Any, (None,)] = None
    response_format: Annotated[Any, (None, {"type": "text"})] = None
    suffix: Annotated[Any, (None, "")] = None
    tool_choice: Annotated[Any, (None, "none", "auto")] = None
    tools: Annotated[Any, (None, [])] = None
    web_search_options: Annotated[Any, (None,)] = None

    def refuse(self) -> None:
        """Raises InvalidRequest naming the first one that asks for something."""
        for name, harmless in _HARMLESS.items():
            if getattr(self, name) not in harmless:
                raise InvalidRequest(f"{name} is not supported: leave it out", field=name)


_HARMLESS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {name: hint.__metadata__[0] for name, hint in get_type_hints(Unsupported, include_extras=True).items()}
)
