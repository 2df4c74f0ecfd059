"""Checkpoints with INT4 experts, and the float32 model that each stands for."""

import re
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import read_tensors, rewrite_as_one_file, tiny_checkpoint

# Widths that are multiples of INT4 groups and FP8 blocks.
WIDE = {"hidden_size": 256, "q_lora_rank": 128, "kv_lora_rank": 128, "moe_intermediate_size": 128}
EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<matrix>gate|up|down)_proj\.weight$")
# Larger than the inputs of experts get with random tokens.
LARGEST_INPUT = 12.0
INPUTS = {"gate": "w1", "down": "w2", "up": "w3"}


def int4_checkpoint(directory: Path, *, static: bool = False, pre_scaled: bool = False, **overrides: Any) -> Path:
    """Make a random checkpoint with INT4 experts.

    static: with scales of the experts' inputs. pre_scaled: with AWQ's scales of these inputs' channels.
    """
    tiny_checkpoint(directory, dtype="w4a8", **WIDE | {"num_nextn_predict_layers": 0} | overrides)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if EXPERT.match(name)]:
            add_scales(tensors, name)

    def add_scales(tensors: dict[str, torch.Tensor], name: str) -> None:
        matrix = EXPERT.match(name)
        assert matrix is not None
        prefix, kind = f"{matrix['experts']}.{matrix['index']}", matrix["matrix"]
        if static:
            tensors[f"{prefix}.{INPUTS[kind]}.input_scale"] = torch.tensor([LARGEST_INPUT / 448])
        if pre_scaled:
            owner = f"{prefix}.down_proj" if kind == "down" else matrix["experts"]
            width = tensors[name].shape[1] * 2
            tensors.setdefault(f"{owner}.pre_quant_scale", torch.rand(width) + 0.5)

    rewrite_as_one_file(directory, add)
    return directory


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs / 2] int8 to [outputs, inputs] float32, weight by weight."""
    halves = [(packed.int() & 15), (packed.int() >> 4) & 15]
    integers = torch.stack(halves, dim=2).flatten(1)
    return torch.where(integers > 7, integers - 16, integers).float()


def dequantized_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every weight of a quantized checkpoint as float32, multiplied by AWQ's scales."""
    stored = read_tensors(directory)
    tensors = {}
    for name, tensor in stored.items():
        matrix = EXPERT.match(name)
        if matrix is not None and tensor.dtype == torch.int8:
            owner = name.removesuffix(".weight") if matrix["matrix"] == "down" else matrix["experts"]
            pre_scale = stored.get(f"{owner}.pre_quant_scale", torch.ones(()))
            scales = stored[f"{name}_scale_inv"].repeat_interleave(128, 1)
            tensors[name] = unpacked(tensor) * scales * pre_scale
        elif tensor.dtype == torch.float8_e4m3fn:
            rows, columns = tensor.shape
            blocks = stored[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            tensors[name] = tensor.float() * blocks[:rows, :columns]
        elif not name.endswith(("_scale_inv", "pre_quant_scale", "input_scale")):
            tensors[name] = tensor.float()
    return tensors
