"""An FP8 checkpoint of any size with random weights, drawn on the device and written by several threads."""

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.weights.shards import INDEX, ITEM_BYTES
from engine.weights.stored import SCALE_SUFFIX
from engine.weights.strips import DTYPES
from kernels.block_quant import BLOCK, quantize_blocks
from tools.byte_tokenizer import READABLE, write_tokenizer
from tools.checkpoint_tensors import TensorSpec, checkpoint_tensors

# As DeepSeek publishes them.
LARGEST_SHARD_BYTES = 4_300_000_000
THREADS = 8
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * ITEM_BYTES[self.dtype]


def write_source(directory: Path, config: Mapping[str, Any], device: torch.device) -> int:
    """Write shards with their index, config.json and a tokenizer; returns the bytes of the shards.

    Matrices are normal and in FP8 as they are published, norms log-normal, so that some channels are louder than others
    by an order of magnitude, as those of trained models are.
    """
    specs = list(checkpoint_tensors(config, READABLE))
    shards = list(_split(specs))
    weight_map: dict[str, str] = {}
    total = 0
    with ThreadPoolExecutor(THREADS) as pool:
        for number, members in enumerate(shards, start=1):
            name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
            stored = [each for spec in members for each in _stored(spec)]
            total += _write_shard(directory / name, members, stored, device, pool)
            weight_map |= dict.fromkeys((each.name for each in stored), name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index))
    write_tokenizer(directory, config["vocab_size"], config["max_position_embeddings"])
    (directory / "config.json").write_text(json.dumps(dict(config)))
    return total


def _write_shard(
    path: Path, specs: Sequence[TensorSpec], stored: Sequence[_Stored], device: torch.device, pool: ThreadPoolExecutor
) -> int:
    # As the safetensors package orders them: the widest dtype first.
    ordered = sorted(stored, key=lambda each: (-ITEM_BYTES[each.dtype], each.name))
    header: dict[str, Any] = {}
    end = 0
    for each in ordered:
        header[each.name] = {
            "dtype": each.dtype,
            "shape": each.shape,
            "data_offsets": (end, end + each.size_bytes),
        }
        end += each.size_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)

    def write(spec: TensorSpec) -> None:
        for name, tensor in _draw(spec, device):
            assert (NAMES[tensor.dtype], tuple(tensor.shape)) == (header[name]["dtype"], header[name]["shape"])
            data = tensor.view(torch.uint8).cpu().numpy().data.cast("B")
            offset = 8 + len(text) + header[name]["data_offsets"][0]
            while data:
                count = os.pwrite(file, data, offset)
                data, offset = data[count:], offset + count

    try:
        os.pwrite(file, len(text).to_bytes(8, "little") + text, 0)
        list(pool.map(write, specs))
    finally:
        os.close(file)
    return end


def _split(specs: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
    shard: list[TensorSpec] = []
    filled = 0
    for spec in specs:
        size = sum(each.size_bytes for each in _stored(spec))
        if shard and filled + size > LARGEST_SHARD_BYTES:
            yield shard
            shard, filled = [], 0
        shard.append(spec)
        filled += size
    yield shard


def _stored(spec: TensorSpec) -> Iterator[_Stored]:
    if spec.quantizable:
        rows, columns = spec.shape
        yield _Stored(spec.name, "F8_E4M3", spec.shape)
        yield _Stored(spec.name + SCALE_SUFFIX, "F32", (-(-rows // BLOCK), -(-columns // BLOCK)))
    else:
        yield _Stored(spec.name, "F32" if spec.full_precision else "BF16", spec.shape)


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
