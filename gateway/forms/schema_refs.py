"""References between the parts of a JSON schema."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote


def resolved(root: Mapping[str, Any], reference: str) -> object:
    """The target of a reference like "#/a/b"; None for any other kind, such as an anchor or another document."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found: object = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, Sequence) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found
