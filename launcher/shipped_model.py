"""The model that is served if none is named; it is a separate distribution."""

from importlib.util import find_spec
from pathlib import Path

from mesh.errors import ConfigError

PACKAGE, CHECKPOINT = "deepmesh_tiny_r1", "tiny-r1"


def shipped_model() -> Path:
    """The directory of tiny-r1's checkpoint. Raises ConfigError if its distribution is not installed."""
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ConfigError("tiny-r1 is not installed: pip install deepmesh-tiny-r1, or name a checkpoint with --model")
    return Path(found.submodule_search_locations[0]) / CHECKPOINT
