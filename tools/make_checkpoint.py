"""Writes a random DeepSeek V3 checkpoint of any size, in the form that Hugging Face tools and deepmesh read."""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file

from engine.model.config import parse_model_config
from kernels.block_quant import quantize_blocks
from kernels.group_quant import GROUP, quantize_groups
from mesh.errors import ConfigError
from tools.byte_tokenizer import READABLE, SMALLEST_VOCABULARY, write_tokenizer
from tools.checkpoint_tensors import TensorSpec, checkpoint_tensors
from tools.quantization_configs import FP8_CONFIG, W4A8_CONFIG

DTYPES = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16})
FLOAT8, W4A8 = "float8", "w4a8"
# The `quantization_config` that is published for a checkpoint, by the name of its dtype.
QUANTIZED: Mapping[str, Mapping[str, Any]] = MappingProxyType({FLOAT8: FP8_CONFIG, W4A8: W4A8_CONFIG})
# Even a small checkpoint has several files, and none is larger than those that DeepSeek publishes.
SHARDS = 4
LARGEST_SHARD_BYTES = 4 << 30

# Keys that are the same in the config.json of DeepSeek V3 models of every size.
COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_type": "deepseek_v3",
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "use_cache": True,
    }
)
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # About a million parameters.
        "tiny": {
            "vocab_size": 320,
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "intermediate_size": 256,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 1024,
        },
        # About thirty million, with the attention dimensions per head of the published model.
        "small": {
            "vocab_size": 1024,
            "hidden_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "q_lora_rank": 256,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "intermediate_size": 1024,
            "moe_intermediate_size": 128,
            "first_k_dense_replace": 1,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "max_position_embeddings": 32768,
            "original_max_position_embeddings": 4096,
        },
    }
)


def make_checkpoint(
    directory: Path,
    preset: str = "small",
    *,
    dtype: str = "bfloat16",
    seed: int = 0,
    overrides: Mapping[str, object] | None = None,
) -> None:
    """Write sharded safetensors with their index, config.json, generation_config.json and a tokenizer to `directory`.

    dtype: "bfloat16", "float16", "float32", "float8" (128x128 blocks with `weight_scale_inv`, the rest bfloat16), or
    "w4a8" (float8 with routed experts in INT4, groups of 128).
    overrides: keys of config.json, any of them. Equal arguments write equal weights.
    Raises ConfigError for an unknown preset or dtype, a vocabulary too small for the tokenizer, or weights that the
    disk has no room for; CheckpointError if the overrides make a model that cannot be served.
    """
    config = checkpoint_config(preset, dtype=dtype, overrides=overrides)
    specs = list(checkpoint_tensors(config, READABLE, parse_model_config(config).indexer))
    directory.mkdir(parents=True, exist_ok=True)
    _check_room(directory, specs)
    _write_json(directory / "config.json", config)
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"], "do_sample": False}
    _write_json(directory / "generation_config.json", generation)
    write_tokenizer(directory, config["vocab_size"], config["max_position_embeddings"])
    write_weights(directory, specs, dtype=dtype, seed=seed)


def _check_room(directory: Path, specs: list[TensorSpec]) -> None:
    """Raises ConfigError if the disk has no room for half a byte per parameter, which is the least (INT4)."""
    least_bytes, free_bytes = sum(math.prod(spec.shape) for spec in specs) // 2, shutil.disk_usage(directory).free
    if least_bytes > free_bytes:
        least, free = f"{least_bytes / 1e9:,.0f} GB", f"{free_bytes / 1e9:,.0f} GB"
        raise ConfigError(f"the weights would take {least} or more, and {directory} has {free} left")


def checkpoint_config(
    preset: str, *, dtype: str = "bfloat16", overrides: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """The config.json of a preset, in the form that DeepSeek publishes."""
    if preset not in PRESETS:
        raise ConfigError(f"unknown preset {preset!r}: choose one of {', '.join(PRESETS)}")
    if dtype not in QUANTIZED and dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}: choose one of {', '.join([*DTYPES, *QUANTIZED])}")
    sizes = dict(PRESETS[preset])
    original = sizes.pop("original_max_position_embeddings")
    factor = sizes["max_position_embeddings"] // original
    config = {**COMMON, **sizes, "rope_scaling": _yarn(factor, original)}
    config["torch_dtype"] = "bfloat16" if dtype in QUANTIZED else dtype
    if dtype in QUANTIZED:
        config["quantization_config"] = dict(QUANTIZED[dtype])
    config.update(overrides or {})
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    parse_model_config(config)
    ragged = [key for key in ("hidden_size", "moe_intermediate_size") if config[key] % GROUP]
    if dtype == W4A8 and ragged:
        raise ConfigError(f"{ragged[0]} {config[ragged[0]]} is not a multiple of {GROUP}, the width of INT4 groups")
    if config["vocab_size"] < SMALLEST_VOCABULARY:
        raise ConfigError(f"vocab_size {config['vocab_size']} is too small: the tokenizer needs {SMALLEST_VOCABULARY}")
    return config


def _yarn(factor: int, original_max_position_embeddings: int) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": factor,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": original_max_position_embeddings,
    }


def write_weights(directory: Path, specs: list[TensorSpec], *, dtype: str, seed: int) -> None:
    """Write the tensors to shards and their index, holding one shard in memory at a time."""
    shards = list(_split(specs))
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, members in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = dict(item for spec in members for item in _store(spec, dtype, seed))
        save_file(tensors, directory / file_name, metadata={"format": "pt"})
        # safetensors makes files that only their owner can read, but a service may run as another user.
        (directory / file_name).chmod(0o644)
        weight_map |= dict.fromkeys(tensors, file_name)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(directory / "model.safetensors.index.json", index)


def _split(specs: list[TensorSpec]) -> Iterator[list[TensorSpec]]:
    sizes = [torch.Size(spec.shape).numel() * 2 for spec in specs]
    limit = min(sum(sizes) / SHARDS, LARGEST_SHARD_BYTES)
    shard: list[TensorSpec] = []
    filled = 0
    for spec, size in zip(specs, sizes, strict=True):
        if shard and filled + size > limit:
            yield shard
            shard, filled = [], 0
        shard.append(spec)
        filled += size
    yield shard


def _store(spec: TensorSpec, dtype: str, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    values = spec.draw(seed)
    if spec.full_precision:
        yield spec.name, values
    elif dtype in QUANTIZED and spec.quantizable:
        in_groups = dtype == W4A8 and ".mlp.experts." in spec.name
        quantized, scale = quantize_groups(values) if in_groups else quantize_blocks(values)
        yield spec.name, quantized
        yield f"{spec.name}_scale_inv", scale
    else:
        yield spec.name, values.to(torch.bfloat16 if dtype in QUANTIZED else DTYPES[dtype])


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
