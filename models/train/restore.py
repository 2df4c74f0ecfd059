"""The weights of a checkpoint, as a start for more training."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from kernels.block_quant import dequantize_blocks
from models.train.export import stored_names
from models.train.indexer import INDEXERS
from models.train.model import TinyModel


@torch.no_grad()
def restore(model: TinyModel, directory: Path) -> None:
    """Overwrite the model's weights with those that `export` wrote, in FP8 or bfloat16, to `directory`. Indexers that
    it lacks stay as they are.
    """
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        stored |= load_file(path)
    state = model.state_dict()
    for name, names in stored_names(model).items():
        if INDEXERS in name and names[0] not in stored:
            continue
        parts = [_plain(stored, each) for each in names]
        state[name].copy_(torch.stack(parts) if len(parts) > 1 else parts[0])


def _plain(stored: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    value = stored[name]
    if value.dtype != torch.float8_e4m3fn:
        return value.float()
    plain = torch.empty(value.shape)
    dequantize_blocks(value, stored[f"{name}_scale_inv"], plain)
    return plain
