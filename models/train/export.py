"""The trained model as a Hugging Face checkpoint with DeepSeek's names, in bfloat16 or in FP8 blocks."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from kernels.block_quant import quantize_blocks
from models.train.indexer import INDEXERS
from models.train.layers import Linear
from models.train.model import TinyModel
from tools.chat import CHAT_TEMPLATE
from tools.quantization_configs import FP8_CONFIG
from tools.tokenizer_files import write_tokenizer_files

LARGEST_SHARD_BYTES = 14_500_000
# Indexers have a file of their own: other files are the same with and without them, if they were trained alone.
INDEXERS_FILE = "indexers.safetensors"


def export(model: TinyModel, config: Mapping[str, Any], tokenizer: Tokenizer, directory: Path, *, fp8: bool) -> None:
    """Write config.json, generation_config.json, the tokenizer and sharded safetensors with their index."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {**config, "quantization_config": dict(FP8_CONFIG)} if fp8 else dict(config)
    _write_json(directory / "config.json", settings)
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"], "do_sample": False}
    _write_json(directory / "generation_config.json", ends)
    write_tokenizer_files(tokenizer, directory, config["max_position_embeddings"], CHAT_TEMPLATE)
    _write_shards(directory, dict(_stored(model, fp8=fp8)))


def _stored(model: TinyModel, *, fp8: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value, quantizable in published_tensors(model):
        if value.dtype == torch.float32 and name.endswith("e_score_correction_bias"):
            yield name, value
        elif fp8 and quantizable:
            values, scale = quantize_blocks(value)
            yield name, values
            yield f"{name}_scale_inv", scale
        else:
            yield name, value.bfloat16()


def published_tensors(model: TinyModel) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """For each tensor its name, float32 value on the CPU, and whether it is published in FP8.

    The MTP module is one more layer at the end.
    """
    last = f"model.layers.{model.config.num_hidden_layers}"
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Linear)}
    plain = {"lm_head.weight", "next_token.eh_proj.weight"}
    state = model.state_dict()
    for name, names in stored_names(model).items():
        value = state[name].detach().float().cpu()
        experts = len(names) > 1
        for published, part in zip(names, value if experts else [value], strict=True):
            yield published, part.contiguous(), experts or name in linear - plain
    yield f"{last}.embed_tokens.weight", model.embed_tokens.weight.detach().float().cpu(), False
    yield f"{last}.shared_head.head.weight", model.lm_head.weight.detach().float().cpu(), False


def stored_names(model: TinyModel) -> dict[str, list[str]]:
    """For each tensor of the model's state its name in checkpoints; several for those that hold all routed experts."""
    last = f"model.layers.{model.config.num_hidden_layers}"
    names = {}
    for name in model.state_dict():
        owner, _, leaf = name.rpartition(".")
        experts = range(model.config.n_routed_experts) if leaf in ("gate_proj", "up_proj", "down_proj") else ()
        names[name] = [f"{_published(owner, last)}.experts.{expert}.{leaf}.weight" for expert in experts] or [
            _published(name, last)
        ]
    return names


def _published(name: str, last: str) -> str:
    if name == "lm_head.weight":
        return name
    name = name.removesuffix("gate.bias") + "gate.e_score_correction_bias" if name.endswith("gate.bias") else name
    if name.startswith("next_token.layer."):
        return f"{last}.{name.removeprefix('next_token.layer.')}"
    if name.startswith("next_token.norm."):
        return f"{last}.shared_head.{name.removeprefix('next_token.')}"
    if name.startswith("next_token."):
        return f"{last}.{name.removeprefix('next_token.')}"
    return f"model.{name}"


def _write_shards(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    indexers = {name: tensor for name, tensor in tensors.items() if INDEXERS in name}
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if name in indexers:
            continue
        if filled + tensor.nbytes > LARGEST_SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    files = {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, start=1)
    }
    if indexers:
        files[INDEXERS_FILE] = indexers
    weight_map: dict[str, str] = {}
    for file_name, shard in files.items():
        save_file(shard, directory / file_name, metadata={"format": "pt"})
        # safetensors makes files that only their owner can read, but a service may run as another user.
        (directory / file_name).chmod(0o644)
        weight_map |= dict.fromkeys(shard, file_name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(directory / "model.safetensors.index.json", index)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
