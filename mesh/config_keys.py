"""Describes the keys of a configuration model, and finds the key that somebody may have meant."""

import ast
import inspect
import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

_TYPES = {int: "integer", float: "number", bool: "true or false", str: "text", SecretStr: "text", Path: "path"}
_OR_NULL = " or null"
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
# Similarity (of difflib) that two keys must have for one to be suggested in place of the other.
_ALIKE = 0.75


@dataclass(frozen=True)
class Key:
    """One key of a configuration file. `path` is dotted, with "[]" after a list: "models[].name"."""

    path: str
    # Type and bounds, and the default, in words.
    kind: str
    default: str
    # The model that has the key.
    owner: type[BaseModel]
    # The model of the keys below it; None for a single value.
    section: type[BaseModel] | None = None
    # Whether it, or a section around it, is marked INTERNAL.
    internal: bool = False

    @property
    def is_text(self) -> bool:
        return self.kind.startswith(("text", "path"))

    @property
    def meaning(self) -> str:
        """What the docstring below the field says, or that of the section."""
        own = _docstrings(self.owner).get(self.path.rpartition(".")[2])
        return " ".join((own or (self.section.__doc__ if self.section is not None else None) or "").split())


def keys_of(model: type[BaseModel], prefix: str = "", internal: bool = False) -> Iterator[Key]:
    """Every key of `model`: sections, each directly before its own keys, and values. internal: whether all are."""
    for name, field in model.model_fields.items():
        section = model_in(field.annotation)
        path = f"{prefix}{name}"
        key = Key(path, _kind(field), _default(field, section), model, section, internal or _is_internal(field))
        yield key
        if section is not None:
            yield from keys_of(section, f"{path}{'[]' if _is_list(field.annotation) else ''}.", key.internal)


def public_keys_of(model: type[BaseModel]) -> Iterator[Key]:
    """The keys that users are told about."""
    return (key for key in keys_of(model) if not key.internal)


def key_at(model: type[BaseModel], location: Sequence[int | str]) -> Key | None:
    """The key at this location of a configuration, as pydantic's errors give it; None if there is none.

    A number is a list index. After the key, the location may name one of the value's types.
    """
    known = {each.path: each for each in keys_of(model)}
    path = ".".join(map(str, location))
    for part in reversed(location):
        found = known.get(re.sub(r"\.\d+(?=\.)", "[]", path)) or known.get(re.sub(r"\.\d+$", "", path))
        if found is not None:
            return found
        path = path.removesuffix(f".{part}")
    return None


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that values of this type are, or contain."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := model_in(part))), None)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """ " (did you mean KEY?)" with the known key most similar to `given`; empty if none is similar."""
    known = list(known)
    leaf = given.rpartition(".")[2]
    same_leaf = [key for key in known if key.rpartition(".")[2] == leaf]
    found = same_leaf or get_close_matches(given, known, 1, _ALIKE)
    return f" (did you mean {found[0]}?)" if found else ""


@cache
def _docstrings(model: type[BaseModel]) -> Mapping[str, str]:
    """The docstrings below the fields of a model and its bases. Pydantic can keep them (use_attribute_docstrings), but
    reads all sources for that whenever a service starts, which takes a seventh of the start.
    """
    found: dict[str, str] = {}
    for each in reversed(model.__mro__[: model.__mro__.index(BaseModel)]):
        (definition,) = ast.parse(dedent(inspect.getsource(each))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, below in pairwise(definition.body):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = text
    return found


def _is_internal(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("internal"))


def _kind(field: FieldInfo) -> str:
    kind, null, _ = _type_name(field.annotation).partition(_OR_NULL)
    return _bounded(kind, field.metadata) + (", or null" if null else "")


def _bounded(kind: str, metadata: Iterable[Any]) -> str:
    metadata = [*metadata, *(inner for each in metadata if isinstance(each, FieldInfo) for inner in each.metadata)]
    bounds = [
        f"{sign} {getattr(each, name)}"
        for each in metadata
        for name, sign in _BOUNDS.items()
        if getattr(each, name, None) is not None
    ]
    return " ".join([kind, " and ".join(bounds)]).rstrip()


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        return _bounded(_type_name(inner), metadata)
    if get_origin(annotation) is Literal:
        return " | ".join(str(each) for each in get_args(annotation))
    if _is_list(annotation):
        return f"list of {_type_name(get_args(annotation)[0])}"
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join("null" if part is types.NoneType else _type_name(part) for part in get_args(annotation))
    return _TYPES.get(annotation, "keys")


def _default(field: FieldInfo, section: type[BaseModel] | None) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if section is not None and isinstance(default, section):
        # A section's keys have their own defaults.
        return ""
    return json.dumps(default, default=str)


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) in (tuple, list)
