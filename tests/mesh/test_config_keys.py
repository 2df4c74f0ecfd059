from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, SecretStr

from mesh.config import INTERNAL, Config
from mesh.config_keys import did_you_mean, keys_of, public_keys_of
from mesh.config_values import validate


class Inner(Config):
    """What is inside."""

    share: float = Field(default=0.5, gt=0, le=1)
    """Part of the memory,
    that is free.
    """


class Hidden(Config):
    share: float = Field(default=0.5, json_schema_extra=INTERNAL)
    section: Inner = Field(default=Inner(), json_schema_extra=INTERNAL)
    shown: int = 1


class Outer(Config):
    name: str
    """Unique."""
    mode: Literal["fast", "slow"] = "fast"
    folder: Path | None = None
    token: SecretStr | None = None
    port: int | None = Field(default=None, ge=0)
    inner: Inner = Inner()
    perhaps: Inner | None = None
    several: tuple[Inner, ...] = ()


KEYS = {key.path: key for key in keys_of(Outer)}


def test_internal_keys_and_sections_are_settable_but_not_public() -> None:
    assert [key.path for key in public_keys_of(Hidden)] == ["shown"]
    assert validate(Hidden, {"share": 0.1, "section": {"share": 0.2}}, "test").section.share == 0.2


def test_a_section_precedes_its_keys_and_a_list_has_brackets() -> None:
    paths = list(KEYS)
    assert paths[5:7] == ["inner", "inner.share"]
    assert paths[9:] == ["several", "several[].share"]


@pytest.mark.parametrize(
    ("path", "kind", "default"),
    [
        ("name", "text", "required"),
        ("mode", "fast | slow", '"fast"'),
        ("folder", "path, or null", "null"),
        ("token", "text, or null", "null"),
        ("port", "integer >= 0, or null", "null"),
        ("inner", "keys", ""),
        ("inner.share", "number > 0 and <= 1", "0.5"),
        ("perhaps", "keys, or null", "null"),
        ("several", "list of keys", "[]"),
    ],
)
def test_a_key_has_type_and_default_in_words(path: str, kind: str, default: str) -> None:
    assert (KEYS[path].kind, KEYS[path].default) == (kind, default)


def test_a_meaning_is_the_fields_or_its_sections_docstring() -> None:
    assert KEYS["name"].meaning == "Unique."
    assert KEYS["inner.share"].meaning == "Part of the memory, that is free."
    assert KEYS["inner"].meaning == "What is inside."


@pytest.mark.parametrize(
    ("given", "meant"),
    [("inner.shore", "inner.share"), ("share", "inner.share"), ("nmae", "name"), ("inner.colour", ""), ("x", "")],
)
def test_a_similar_key_is_suggested(given: str, meant: str) -> None:
    assert did_you_mean(given, KEYS) == (f" (did you mean {meant}?)" if meant else "")
