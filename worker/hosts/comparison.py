"""Checks whether two hosts of a worker have the same version and configuration."""

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# UCX's devices have different names on each host.
OF_EACH_HOST = frozenset({"transfer.devices"})


def own_version() -> str:
    try:
        return version("deepmesh")
    except PackageNotFoundError:
        # Run from a checkout.
        return "not installed"


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first key whose value differs, in words; None if there is none. Both arguments are an engine's configuration
    as JSON.
    """
    here, there = dict(_values(ours)), dict(_values(theirs))
    for key in sorted(here.keys() | there.keys()):
        if key not in OF_EACH_HOST and (key not in here or key not in there or here[key] != there[key]):
            return f"engine.{key} is {_shown(there, key)} there and {_shown(here, key)} here"
    return None


def _values(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _values(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _shown(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "unknown"
