"""The values of a configuration: from YAML and `key=value` overrides to a model. An unknown key fails the start."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from mesh.addresses import is_ipv6
from mesh.config import Config
from mesh.config_keys import did_you_mean, key_at, keys_of, model_in
from mesh.errors import ConfigError
from mesh.text_files import read_text

# Kinds of pydantic's errors that are explained by the key's type and bounds alone.
_OF_ANOTHER_KIND = ("greater_than", "less_than", "literal_error", "int_from_float")
_NO_VALUE_OF_ITS_KIND = ("_type", "_parsing")
_OF_ANOTHER_LENGTH = ("too_short", "too_long")

ConfigT = TypeVar("ConfigT", bound=Config)


def load(
    model: type[ConfigT],
    path: Path | None = None,
    overrides: Sequence[str] = (),
    origin: str = "configuration",
    overlays: Sequence[Path] = (),
) -> ConfigT:
    """Read `path` (YAML; None means all defaults), lay the files `overlays` over it, apply `overrides`
    ("engine.max_requests=8"), and validate.

    Raises ConfigError naming every wrong key and the source of the values: the files and --set, or `origin` if there is
    no file.
    """
    values = _read(path) if path is not None else {}
    for overlay in overlays:
        _lay_over(values, _read(overlay))
    for override in overrides:
        _apply(values, override)
    if path is not None:
        origin = " with ".join([str(path), *map(str, overlays), *(["--set"] if overrides else [])])
    return validate(model, values, origin)


def overridden(overrides: Sequence[str]) -> dict[str, Any]:
    """The values that these overrides set, as nested dicts. Raises ConfigError for a malformed one."""
    values: dict[str, Any] = {}
    for override in overrides:
        _apply(values, override)
    return values


def validate(model: type[ConfigT], values: Mapping[str, Any], origin: str) -> ConfigT:
    """`values` as a `model`. Raises ConfigError naming `origin` and every offending key."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        # A value with several possible types has an error for each type.
        problems = dict.fromkeys(_in_words(model, each) for each in error.errors(include_input=False))
        raise ConfigError(f"{origin}: {'; '.join(problems)}") from error


def _in_words(model: type[BaseModel], error: ErrorDetails) -> str:
    location, kind, message = error["loc"], error["type"], error["msg"]
    key = ".".join(map(str, location))
    known_key = key_at(model, location)
    if known_key is not None and kind.endswith(_OF_ANOTHER_LENGTH):
        return f"{key}: expected {_length(known_key.is_text, error['ctx'])}"
    if known_key is not None and (kind.startswith(_OF_ANOTHER_KIND) or kind.endswith(_NO_VALUE_OF_ITS_KIND)):
        return f"{known_key.path}: expected {known_key.kind}"
    if known_key is not None and kind == "missing":
        return f"missing key {key}: expected {known_key.kind}"
    if kind == "string_pattern_mismatch" and (examples := _field_at(model, location).examples):
        return f"{key}: expected text such as {examples[0]}"
    if kind != "extra_forbidden":
        # The messages of our own validators name the keys that conflict.
        message = message.removeprefix("Value error, ")
        return f"{key}: {message}" if key else message
    known = [each.path for each in keys_of(model)]
    if meant := did_you_mean(key, known):
        return f"unknown key {key}{meant}"
    *parents, _ = location
    where = f"of {'.'.join(map(str, parents))} " if parents else ""
    return f"unknown key {key}: the keys {where}are {', '.join(sorted(_model_at(model, parents).model_fields))}"


def _model_at(model: type[BaseModel], location: Sequence[str | int]) -> type[BaseModel]:
    for part in location:
        # A number is an index into a list of models.
        if isinstance(part, str):
            model = model_in(model.model_fields[part].annotation) or model
    return model


def _field_at(model: type[BaseModel], location: Sequence[str | int]) -> FieldInfo:
    *parents, name = location
    return _model_at(model, parents).model_fields[str(name)]


def _length(is_text: bool, bounds: Mapping[str, Any]) -> str:
    """The wrong length in words. The unit depends on the type: pydantic calls a secret's characters items."""
    bound, number = ("at least", bounds["min_length"]) if "min_length" in bounds else ("at most", bounds["max_length"])
    unit = "character" if is_text else "value"
    return f"{bound} {number} {unit}{'' if number == 1 else 's'}"


def _read(path: Path) -> dict[str, Any]:
    values = _in_file(path)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected keys and values at the top level")
    return values


def _lay_over(values: dict[str, Any], others: Mapping[str, Any]) -> None:
    """Set all that `others` has, key by key; a list or a single value replaces the previous one."""
    for key, value in others.items():
        current = values.get(key)
        if isinstance(current, dict) and isinstance(value, dict):
            _lay_over(current, value)
        else:
            values[key] = value


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r}: expected key=value")
    *parents, leaf = key.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ConfigError(f"override of {key}: {parent} holds a value, not keys")
    values[leaf] = _value(key, text)


def _value(key: str, text: str) -> Any:
    """A value in YAML, or read from the file named after an @. No YAML value begins with @. IPv6 addresses need no
    quotes, though YAML takes some for lists.
    """
    if text.startswith("@"):
        return _in_file(Path(text[1:]))
    if is_ipv6(text):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override of {key}: its value is no YAML{_place(error)}") from None


def _in_file(path: Path) -> Any:
    """A value from a file, which keeps it off command lines. It may be a secret, so no message may quote it."""
    try:
        return yaml.safe_load(read_text(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} holds no YAML{_place(error)}") from None


def _place(error: yaml.YAMLError) -> str:
    """Line and column of the error, without the text there: it may be a secret, since secrets come from files too."""
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
