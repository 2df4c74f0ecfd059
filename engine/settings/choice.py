"""One chosen setting, and the keys of a configuration by their dotted names."""

from dataclasses import dataclass
from typing import Any, TypeVar

from mesh.config import Config

ConfigT = TypeVar("ConfigT", bound=Config)


@dataclass(frozen=True)
class Choice:
    """key: dotted, below `engine`. reason: one line, with the figures that it follows from."""

    key: str
    value: Any
    reason: str
    # Whether it differs from the key's default.
    differs: bool = False

    def __str__(self) -> str:
        value = {None: "null"}.get(self.value, self.value)
        return f"engine.{self.key}={value}: {self.reason}"


def is_given(config: Config, key: str) -> bool:
    """Whether somebody set this key, if only to its default."""
    first, _, rest = key.partition(".")
    if first not in config.model_fields_set:
        return False
    below = getattr(config, first)
    return is_given(below, rest) if rest and isinstance(below, Config) else True


def value_of(config: Config, key: str) -> Any:
    """None if a section on the way is null."""
    first, _, rest = key.partition(".")
    below = getattr(config, first)
    return value_of(below, rest) if rest and below is not None else below


def with_value(config: ConfigT, key: str, value: Any) -> ConfigT:
    """The configuration with another value for the key, not validated."""
    first, _, rest = key.partition(".")
    return config.model_copy(update={first: with_value(getattr(config, first), rest, value) if rest else value})
