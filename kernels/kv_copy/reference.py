"""Copies between tokens and the paged pool in plain torch: the definition."""

from collections.abc import Sequence

import torch

from kernels.act_quant import Quantized, empty_quantized, quantize

BLOCK_TOKENS = 64
COMPRESSED = torch.float8_e4m3fn


def slot_runs(block_ids: Sequence[int], tokens: int) -> list[slice]:
    runs: list[slice] = []
    for index in range(-(-tokens // BLOCK_TOKENS)):
        start = block_ids[index] * BLOCK_TOKENS
        stop = start + min(BLOCK_TOKENS, tokens - index * BLOCK_TOKENS)
        if runs and runs[-1].stop == start:
            runs[-1] = slice(runs[-1].start, stop)
        else:
            runs.append(slice(start, stop))
    return runs


def write_latents(latents: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor, scale: float) -> None:
    flat = pool.view(-1, pool.shape[2])
    if pool.dtype == latents.dtype:
        flat.index_copy_(0, slots, latents)
    else:
        # As bytes: few operations support one-byte floats.
        flat.view(torch.uint8).index_copy_(0, slots, compress(latents, scale).view(torch.uint8))


def compress(latents: torch.Tensor, scale: float) -> torch.Tensor:
    limit = torch.finfo(torch.float8_e4m3fn).max
    return (latents.float() / scale).clamp(-limit, limit).to(torch.float8_e4m3fn)


def read_latents(pool: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    flat = pool.view(-1, pool.shape[2])
    if pool.dtype != COMPRESSED:
        found = flat.index_select(0, slots)
        return compress(found, scale) if dtype == COMPRESSED else found
    # As bytes: few operations support one-byte floats.
    stored = flat.view(torch.uint8).index_select(0, slots).view(pool.dtype)
    return stored if dtype == COMPRESSED else (stored.float() * scale).to(dtype)


def gather_blocks(
    pool: torch.Tensor, first_layer: int, layers: int, blocks: torch.Tensor, staging: torch.Tensor
) -> None:
    pieces = pool.view(torch.uint8)[first_layer : first_layer + layers, blocks.long()]
    staging[: pieces.numel()] = pieces.flatten()


def scatter_blocks(
    staging: torch.Tensor, pool: torch.Tensor, first_layer: int, layers: int, blocks: torch.Tensor
) -> None:
    stored = pool.view(torch.uint8)
    shape = (layers, len(blocks), *stored.shape[2:])
    pieces = staging[: layers * len(blocks) * stored[0, 0].numel()].view(shape)
    stored[first_layer : first_layer + layers, blocks.long()] = pieces


def read_quantized(
    pool: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, scale: float, width: int, powers: bool
) -> tuple[Quantized, torch.Tensor]:
    latents = read_latents(pool, slots, dtype, scale)
    rest = latents[:, width:].contiguous()
    if pool.dtype != COMPRESSED:
        return quantize(latents[:, :width], powers=powers), rest
    out = empty_quantized(len(slots), width, device=pool.device, powers=powers)
    # As bytes: few operations support one-byte floats.
    out.values.view(torch.uint8).copy_(pool.view(-1, pool.shape[2]).view(torch.uint8)[slots, :width])
    out.scales.fill_(scale)
    return out, rest


def place_latents(latents: torch.Tensor, order: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> None:
    # As bytes: few operations support one-byte floats.
    stored = pool.view(-1, pool.shape[2]).view(torch.uint8)
    stored.index_copy_(0, slots, latents.view(torch.uint8).index_select(0, order))
