"""The sandbox in which chat templates run, with the filters, globals and tags that transformers offers them.

Published templates are written for transformers' `apply_chat_template`, so names and results must be the same.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from gateway.prompts.control_text import STAND_INS

_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


def template_environment(clock: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """clock: the local time that templates may write into a prompt."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda format: clock().strftime(format),
        "dict": _Dicts(),
        "namespace": _PublicNamespace,
    }
    return environment


class GenerationTag(Extension):
    """`{% generation %}` marks an assistant's words for training. In a prompt it only bounds the scope of variables."""

    tags = {"generation"}  # noqa: RUF012, for the base class declares it so.

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as `json.dumps` writes it; Jinja's own filter escapes HTML. Disguised keys are sorted by their stand-ins."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(_escaped, text) if ensure_ascii else text


def _escaped(found: re.Match[str]) -> str:
    # A stand-in is an ASCII character in disguise.
    character = found[0]
    return character if ord(character) in STAND_INS else json.dumps(character)[1:-1]


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


class _Dicts:
    """`dict` without the type itself, whose attributes lead out of the sandbox."""

    def __call__(self, *args: Any, **members: Any) -> dict[Any, Any]:
        return dict(*args, **members)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _PublicNamespace(Namespace):
    """A namespace that holds no name with a leading underscore: those lead to Python's own attributes."""

    def __init__(*args: Any, **members: Any) -> None:
        # `self` is not a parameter, so that a template may have a member of that name.
        self, *mappings = args
        Namespace.__init__(self, _public(dict(*mappings, **members)))

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(*next(iter(_public({name: value}).items())))


def _public(members: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in members:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}: names must not begin with an underscore")
    return members
