"""Packages of vendors: each may be absent, of another version than our adapters call, or built for another torch.

What is there is tried once, on a small input, before anything relies on it. A package that fails is left alone, with a
warning, and our own kernels compute.
"""

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType

_log = logging.getLogger("deepmesh.kernels")


def find_package(name: str, needs: Sequence[str]) -> ModuleType | None:
    """The package, imported; None if there is none, or if it cannot be loaded or lacks one of the functions `needs`."""
    try:
        package = import_module(name)
        lacking = [function for function in needs if not hasattr(package, function)]
    except ModuleNotFoundError as absent:
        if absent.name != name:
            _warn(name, absent)
        return None
    except Exception as failure:  # noqa: BLE001 - somebody else's code, which may even have called a compiler
        _warn(name, failure)
        return None
    if lacking:
        _log.warning("%s is not used: this package has no %s", name, ", ".join(lacking))
        return None
    return package


def is_right(name: str, trial: Callable[[], float], most: float) -> bool:
    """Whether a package computes what it should. trial: computes something with it, and returns the relative error."""
    try:
        error = trial()
    except Exception as failure:  # noqa: BLE001 - as above
        _warn(name, failure)
        return False
    # NaN does not pass.
    right = error < most
    if not right:
        _log.warning("%s is not used: a trial of it had a relative error of %.3g", name, error)
    return right


def _warn(name: str, failure: Exception) -> None:
    said = str(failure).strip().splitlines()
    _log.warning("%s is not used: %s: %s", name, type(failure).__name__, said[0] if said else "no message")
