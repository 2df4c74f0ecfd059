"""Request fields that change nothing, and features that we lack: refused by name unless their value asks for
nothing.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

from msgspec import Meta, Struct

from mesh.errors import Unsupported


def harmless(*values: object, why: str | None = None) -> Meta:
    """Marks a feature that we lack, with the values that ask for nothing. The schema shows these values to clients.

    why: the reason that clients get.
    """
    return Meta(extra_json_schema={"enum": list(values)}, description=why)


class Accepted(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields for OpenAI's own bookkeeping: no answer depends on them."""

    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None

    def refuse(self) -> None:
        """Raises Unsupported naming the first `harmless` field whose value asks for something."""
        for name, mark in _marks(type(self)).items():
            values = (mark.extra_json_schema or {})["enum"]
            if not any(_same(getattr(self, name), value) for value in values):
                why = f" ({mark.description})" if mark.description else ""
                raise Unsupported(f"{name} is not supported{why}: leave it out", field=name)


def _same(given: object, value: object) -> bool:
    """Whether JSON holds both for the same value: 0 is not false."""
    return isinstance(given, bool) == isinstance(value, bool) and given == value


@cache
def _marks(kind: type[Accepted]) -> Mapping[str, Meta]:
    """Marks by field. A subclass that supports a feature declares its own field with that name, which has no mark."""
    hints = get_type_hints(kind, include_extras=True)
    marks = {name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()}
    return {name: mark for name, mark in marks.items() if isinstance(mark, Meta) and mark.extra_json_schema is not None}
