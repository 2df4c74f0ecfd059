"""An FP8 checkpoint of any size with random weights, drawn on the device."""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.weights.headers import INDEX
from engine.weights.stored import SCALE_SUFFIX
from kernels.block_quant import quantize_blocks
from tools.byte_tokenizer import READABLE, write_tokenizer
from tools.checkpoint_tensors import TensorSpec, checkpoint_tensors
from tools.tensor_file import write_tensors

# As DeepSeek publishes them.
LARGEST_SHARD_BYTES = 4_300_000_000


def write_source(directory: Path, config: Mapping[str, Any], device: torch.device) -> int:
    """Write shards with their index, config.json and a tokenizer; returns the bytes of the shards.

    Matrices are normally distributed, in FP8 as they are published. Norms are log-normal, so that some channels are
    louder than others by an order of magnitude, as in trained models.
    """
    specs = list(checkpoint_tensors(config, READABLE))
    shards = list(_split(specs))
    weight_map: dict[str, str] = {}
    total = 0
    for number, members in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        tensors = dict(item for spec in members for item in _draw(spec, device))
        write_tensors(directory / name, tensors, {"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index), encoding="utf-8")
    write_tokenizer(directory, config["vocab_size"], config["max_position_embeddings"])
    (directory / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    return total


def _split(specs: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """Divide tensors into shards of up to LARGEST_SHARD_BYTES, not counting scales."""
    shard: list[TensorSpec] = []
    filled = 0
    for spec in specs:
        size = torch.Size(spec.shape).numel() * (1 if spec.quantizable else 2)
        if shard and filled + size > LARGEST_SHARD_BYTES:
            yield shard
            shard, filled = [], 0
        shard.append(spec)
        filled += size
    yield shard


def _draw(spec: TensorSpec, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator(device).manual_seed(zlib.crc32(spec.name.encode()))
    values = torch.randn(spec.shape, generator=generator, device=device)
    if spec.quantizable:
        quantized, scale = quantize_blocks(values.mul_(spec.shape[1] ** -0.5))
        yield spec.name, quantized
        yield spec.name + SCALE_SUFFIX, scale
    elif spec.full_precision:
        yield spec.name, values.mul_(0.1)
    elif len(spec.shape) == 1:
        yield spec.name, values.exp_().bfloat16()
    else:
        yield spec.name, values.mul_(spec.shape[1] ** -0.5).bfloat16()
