"""Checkpoints in INT4 of compressed-tensors, AutoAWQ and GPTQModel, and the float32 model that each stands for.

The layouts are written weight by weight here, as those packages define them.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.checkpoints import edit_config, rewrite_as_one_file
from tools.make_checkpoint import make_checkpoint

EXPERTS = re.compile(r"\.mlp\.experts\.\d+\.\w+_proj\.weight$")
LINEAR = re.compile(r"_proj(_with_mqa)?\.weight$")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# As in Kimi-K2-Thinking's and K2.5's config.json.
COMPRESSED_WEIGHTS: Mapping[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}


def compressed_config(**changes: Any) -> dict[str, Any]:
    """changes: of the weights' settings."""
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**COMPRESSED_WEIGHTS, **changes},
    }
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


# By tool: quantization_config, as the tools write it.
CONFIGS: Mapping[str, dict[str, Any]] = {
    "compressed-tensors": compressed_config(),
    "awq": {
        "bits": 4,
        "group_size": 64,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    },
    "gptq": {
        "bits": 4,
        "checkpoint_format": "gptq",
        "desc_act": False,
        "group_size": 64,
        "quant_method": "gptq",
        "sym": True,
    },
}


def as_int32(values: list[torch.Tensor]) -> torch.Tensor:
    """Eight integers from 0 to 15 in each item, the first in its lowest bits."""
    total = sum(value.long() << (4 * place) for place, value in enumerate(values))
    assert isinstance(total, torch.Tensor)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def pack_compressed(module: str, weight: torch.Tensor, group: int = 32) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """weight: [outputs, inputs]. Returns the tensors by name, and what they stand for in float32."""
    scales = (weight.unflatten(1, (-1, group)).abs().amax(2) / 7.5).bfloat16()
    wide = scales.float().repeat_interleave(group, 1)
    # Integers have no negative zero.
    integers = (weight / wide).round().clamp(-8, 7).int()
    tensors = {
        "weight_packed": as_int32([integers[:, place::8] + 8 for place in range(8)]),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}, integers * wide


def with_zeros(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """weight: [inputs, outputs]. Returns its integers, and scales and zeros by group, and what they stand for."""
    groups = weight.unflatten(0, (-1, group))
    low, high = groups.amin(1), groups.amax(1)
    scales = ((high - low) / 14).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    wide_scales, wide_zeros = (each.float().repeat_interleave(group, 0) for each in (scales, zeros))
    integers = (weight / wide_scales + wide_zeros).round().clamp(0, 15)
    return integers, scales, zeros, (integers - wide_zeros) * wide_scales


def pack_awq(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    integers, scales, zeros, exact = with_zeros(weight.t(), 64)
    tensors = {
        "qweight": as_int32([integers[:, column::8] for column in AWQ_ORDER]),
        "qzeros": as_int32([zeros[:, column::8] for column in AWQ_ORDER]),
        "scales": scales,
    }
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}, exact.t()


def pack_gptq(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    integers, scales, zeros, exact = with_zeros(weight.t(), 64)
    tensors = {
        "qweight": as_int32([integers[row::8] for row in range(8)]),
        "qzeros": as_int32([zeros[:, column::8] - 1 for column in range(8)]),
        "scales": scales,
        "g_idx": (torch.arange(len(integers)) // 64).int(),
    }
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}, exact.t()


PACK: Mapping[str, Callable[[str, torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]] = {
    "awq": pack_awq,
    "gptq": pack_gptq,
}


def packed_checkpoint(directory: Path, tool: str, *, group: int = 32, **overrides: Any) -> tuple[Path, Path]:
    """A random checkpoint as the tool packs it, and its twin: the same model in float32.

    group: inputs that share a scale, where compressed-tensors packs it.
    """
    source, twin = directory / tool, directory / f"{tool}-twin"
    make_checkpoint(source, "tiny", dtype="bfloat16", overrides={"num_nextn_predict_layers": 0} | overrides)
    exact: dict[str, torch.Tensor] = {}

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        packed = EXPERTS if tool == "compressed-tensors" else LINEAR
        pack_matrix = partial(pack_compressed, group=group) if tool == "compressed-tensors" else PACK[tool]
        for name in sorted(tensors):
            weight = tensors[name].float()
            if packed.search(name):
                del tensors[name]
                added, weight = pack_matrix(name.removesuffix(".weight"), weight)
                tensors |= {name: tensor.contiguous() for name, tensor in added.items()}
            exact[name] = weight.contiguous()

    rewrite_as_one_file(source, pack)
    twin.mkdir()
    save_file(exact, twin / "model.safetensors", metadata={"format": "pt"})
    (twin / "config.json").write_bytes((source / "config.json").read_bytes())
    config = compressed_config(group_size=group) if tool == "compressed-tensors" else CONFIGS[tool]
    edit_config(source, quantization_config=config)
    return source, twin


def as_kimi_k25(source: Path) -> None:
    """Make a checkpoint one of a model that also sees, as Kimi-K2.5 is published."""

    def see(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_tower.encoder.blocks.0.wqkv.weight"] = torch.zeros(6, 2)
        tensors["mm_projector.linear_1.weight"] = torch.zeros(2, 2)

    rewrite_as_one_file(source, see)
    text = json.loads((source / "config.json").read_text())
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "eos_token_id": text["eos_token_id"],
        "text_config": text | {"model_type": "kimi_k2"},
        "vision_config": {"patch_size": 14},
    }
    (source / "config.json").write_text(json.dumps(config))
