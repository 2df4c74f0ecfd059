"""Quantization of weights in groups in plain torch, the definition."""

import torch

GROUP = 128
LOWEST, HIGHEST = -8, 7


def quantize_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight.float().unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(dim=2)
    # Kernels take scales in bfloat16: rounded first, the integers are the nearest to what will be computed.
    scales = torch.where(largest > 0, largest / HIGHEST, torch.ones_like(largest)).bfloat16().float()
    integers = (groups / scales.unsqueeze(2)).round().clamp(LOWEST, HIGHEST).to(torch.int8).flatten(1)
    return (integers[:, 0::2] & 15) | (integers[:, 1::2] << 4), scales


def dequantize_groups(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    integers = torch.stack([(packed << 4) >> 4, packed >> 4], dim=2).flatten(1)
    weight = integers.float()
    weight.unflatten(1, (-1, GROUP)).mul_(scales.unsqueeze(2))
    return weight
