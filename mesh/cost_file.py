"""Reads and writes cost files (see `mesh.costs`): JSON, made by `deepmesh calibrate`."""

from pathlib import Path

import msgspec

from mesh.costs import CostFile
from mesh.errors import ConfigError
from mesh.text_files import read_text


def load_costs(path: Path) -> CostFile:
    """Raises ConfigError with a message of one sentence."""
    try:
        return msgspec.json.decode(read_text(path), type=CostFile)
    except OSError as error:
        raise ConfigError(f"cannot read the cost file {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"the cost file {path}: {error}") from error


def save_costs(file: CostFile, path: Path) -> None:
    """Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the cost file {path}: {error.strerror}") from error
