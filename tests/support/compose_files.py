"""Services as compose makes them of its files and variables, as far as our files use its syntax. Without Docker."""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from tests.support.other_version import ROOT

# ${NAME:-default}, ${NAME:+instead} and ${NAME:?error}, each with another such expression in it.
_EXPRESSION = re.compile(r"\$\{(\w+)(?::([-+?])((?:[^{}]|\$\{[^{}]*\})*))?\}")


def services(files: tuple[str, ...], variables: Mapping[str, str]) -> dict[str, Any]:
    """The services of these files of deploy/, the later files laid over the earlier ones."""
    merged: dict[str, Any] = {}
    for file in files:
        merged = _merged(merged, yaml.safe_load((ROOT / "deploy" / file).read_text())["services"])
    found: dict[str, Any] = _interpolated(merged, variables)
    return found


def _merged(base: Any, other: Any) -> Any:
    if isinstance(base, dict) and isinstance(other, dict):
        return {**base, **{key: _merged(base.get(key), value) for key, value in other.items()}}
    return other


def _interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _interpolated(each, variables) for key, each in value.items()}
    if isinstance(value, list):
        return [_interpolated(each, variables) for each in value]
    return _text(value, variables) if isinstance(value, str) else value


def _text(text: str, variables: Mapping[str, str]) -> str:
    def replacement(found: re.Match[str]) -> str:
        name, kind, word = found.groups()
        said = variables.get(name, "")
        assert kind != "?" or said, f"{name} is required"
        instead = _text(word or "", variables)
        return {"-": said or instead, "+": instead if said else ""}.get(kind, said)

    return _EXPRESSION.sub(replacement, text)
