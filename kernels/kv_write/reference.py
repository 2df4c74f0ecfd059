"""Norms, rotation and the write to the pool in plain torch: the definition."""

import torch

from kernels.act_quant import Quantized, quantize
from kernels.kv_copy.reference import write_latents
from kernels.norm.reference import rms_norm
from kernels.rope.reference import rotate


def norm_and_write(
    projected: torch.Tensor,
    query_weight: torch.Tensor | None,
    latent_weight: torch.Tensor,
    epsilon: float,
    rotations: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    query, latents = projected.split([projected.shape[1] - pool.shape[2], pool.shape[2]], dim=1)
    compressed, key = latents.split([latent_weight.shape[0], latents.shape[1] - latent_weight.shape[0]], dim=1)
    compressed.copy_(rms_norm(compressed, latent_weight, epsilon))
    rotate(key.unsqueeze(1), rotations, key.unsqueeze(1))
    write_latents(latents, slots, pool, scale)
    return query if query_weight is None else rms_norm(query, query_weight, epsilon)


def norm_quantize_and_write(
    projected: torch.Tensor,
    query_weight: torch.Tensor,
    latent_weight: torch.Tensor,
    epsilon: float,
    rotations: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    scale: float,
    powers: bool = False,
) -> Quantized:
    query = norm_and_write(projected, query_weight, latent_weight, epsilon, rotations, slots, pool, scale)
    return quantize(query, powers=powers)
