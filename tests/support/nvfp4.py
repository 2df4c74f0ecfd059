"""Checkpoints in NVFP4 as ModelOpt writes them, and the float32 model that each stands for."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels.nvfp4_quant import GROUP, quantize_nvfp4
from tests.support.checkpoints import edit_config, read_tensors, rewrite_as_one_file, tiny_checkpoint

# Widths that the kernel accepts.
WIDE = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 128, "v_head_dim": 16}
FEED_FORWARD = re.compile(r"\.mlp\.(?!gate\.).*_proj\.weight$")
WITH_OUTPUT = re.compile(rf"{FEED_FORWARD.pattern}|\.o_proj\.weight$")
MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nvfp4_checkpoint(
    directory: Path,
    *,
    quantized: re.Pattern[str] = FEED_FORWARD,
    keep: Callable[[str], bool] = lambda _: False,
    **overrides: Any,
) -> Path:
    """Make a random checkpoint in bfloat16. quantized: the names of matrices that are in NVFP4; keep: exceptions."""
    tiny_checkpoint(directory, dtype="bfloat16", **WIDE | overrides)

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if quantized.search(name) and not keep(name)]:
            codes, scales, global_scale = quantize_nvfp4(tensors[name])
            tensors |= {name: codes, f"{name}_scale": scales, f"{name}_scale_2": global_scale}
            tensors[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.01)

    rewrite_as_one_file(directory, quantize)
    edit_config(directory, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    return directory


def dequantized_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every weight as float32."""
    stored = read_tensors(directory)
    tensors = {}
    for name, tensor in stored.items():
        if tensor.dtype == torch.uint8:
            halves = torch.stack([tensor & 15, tensor >> 4], dim=2).flatten(1).long()
            values = MAGNITUDES[halves & 7] * torch.where(halves >= 8, -1.0, 1.0)
            steps = stored[f"{name}_scale"].float().repeat_interleave(GROUP, 1) * stored[f"{name}_scale_2"]
            tensors[name] = values * steps
        elif not name.endswith(("_scale", "_scale_2")):
            tensors[name] = tensor.float()
    return tensors
