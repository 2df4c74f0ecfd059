"""Reads the JSON files of a checkpoint, and says what is wrong with them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh.errors import CheckpointError
from mesh.text_files import read_text


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint; CheckpointError names what is wrong with it."""
    if not path.exists():
        raise CheckpointError(f"{path} is missing: {path.parent} is not a Hugging Face checkpoint")
    try:
        values = json.loads(read_text(path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except RecursionError:
        raise CheckpointError(f"cannot read {path}: it is nested too deeply") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return values


class JsonReader:
    """Reads values of a JSON object; null counts as absent."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        """path: what the keys begin with in messages, such as "quantization_config."."""
        self._values = values
        self.path = path

    def count(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise CheckpointError(f"{self.path}{key} is {value!r}: expected a whole number")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.count(key, default)
        if value == 0:
            raise CheckpointError(f"{self.path}{key} is 0: expected at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
            raise CheckpointError(f"{self.path}{key} is {value!r}: expected a number, not negative")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{self.path}{key} is {value!r}: expected true or false")
        return default if value is None else value

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def text(self, *keys: str) -> str | None:
        """The first of the keys that is there."""
        return next((str(self._values[key]) for key in keys if self._values.get(key) is not None), None)

    def section(self, key: str) -> "JsonReader | None":
        """The keys and values below `key`; None if there are none."""
        value = self._values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.path}{key} is {value!r}: expected keys and values")
        return JsonReader(value, f"{self.path}{key}.")

    def sections(self) -> "list[JsonReader]":
        """Those of all keys that have some."""
        return [found for key in self._values if (found := self.section(key)) is not None]

    def _get(self, key: str, default: float | None) -> object:
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.path}{key} is missing")
        return value
