"""Cost files: a calibrated cost model (`mesh.costs`) as JSON, made by `deepmesh calibrate`."""

from pathlib import Path

import msgspec

from mesh.costs import CostModel
from mesh.errors import ConfigError
from mesh.text_files import read_text


class CostFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A calibrated cost model, the setup it was measured on, and its error."""

    costs: CostModel
    # The measured setup, in words.
    device: str = ""
    model: str = ""
    # How the worker's ranks share the model, and its number formats, e.g. "ep8" and "fp8, bf16 KV".
    layout: str = ""
    format: str = ""
    source: str = ""
    # Largest relative difference between a measurement and a model fitted without it; None if there were too few.
    error: float | None = None


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
