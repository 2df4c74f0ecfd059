"""Whether a checkpoint has the MTP modules that drafts need: config.json may count some that its files lack."""

import json
import struct
from collections.abc import Iterable
from pathlib import Path

from engine.model.config import ModelConfig
from engine.model.json_reader import read_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LENGTH = struct.Struct("<Q")


def has_draft_modules(model_dir: Path, model: ModelConfig) -> bool:
    """By the names of the tensors, of which the index is read, or the header of a single file; in a folder without
    weights by config.json alone. Raises CheckpointError if the index cannot be read.
    """
    first = model.num_hidden_layers
    prefixes = [f"model.layers.{layer}." for layer in range(first, first + model.num_nextn_predict_layers)]
    if not prefixes:
        return False
    if not any((model_dir / name).exists() for name in (INDEX, SINGLE)):
        return True
    names = list(_tensor_names(model_dir))
    return all(any(name.startswith(prefix) for name in names) for prefix in prefixes)


def _tensor_names(model_dir: Path) -> Iterable[str]:
    if (model_dir / INDEX).exists():
        names = read_json(model_dir / INDEX).get("weight_map")
        return names if isinstance(names, dict) else ()
    try:
        with (model_dir / SINGLE).open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            header = json.loads(file.read(length))
    except (OSError, ValueError, struct.error):
        # The rank that loads the file says what is wrong with it.
        return ()
    return header if isinstance(header, dict) else ()
