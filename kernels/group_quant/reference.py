"""Quantization of weights in groups in plain torch, the definition."""

import torch

GROUP = 128
# -8 is left out: it takes longer to decode, and no scale of a group's largest magnitude needs it.
HIGHEST = 7
# Shares of a group's largest magnitude that may become 7.
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


def quantize_groups(weight: torch.Tensor, importance: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight.float().unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(dim=2)
    if importance is None:
        scales = _scales(largest)
    else:
        scales = _best_scales(groups, largest, importance.unflatten(0, (-1, GROUP)))
    integers = _round(groups, scales).to(torch.int8).flatten(1)
    return (integers[:, 0::2] & 15) | (integers[:, 1::2] << 4), scales


def _best_scales(groups: torch.Tensor, largest: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    best, least = torch.empty_like(largest), torch.full_like(largest, torch.inf)
    for share in SHARES:
        scales = _scales(largest * share)
        difference = _round(groups, scales).mul_(scales.unsqueeze(2)).sub_(groups)
        error = difference.square_().mul_(importance).sum(dim=2)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    return best


def _scales(largest: torch.Tensor) -> torch.Tensor:
    # Kernels take scales in bfloat16: rounded first, the integers are the nearest to what will be computed.
    return torch.where(largest > 0, largest / HIGHEST, torch.ones_like(largest)).bfloat16().float()


def _round(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (groups / scales.unsqueeze(2)).round_().clamp_(-HIGHEST, HIGHEST)


def dequantize_groups(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    integers = torch.stack([(packed << 4) >> 4, packed >> 4], dim=2).flatten(1)
    weight = integers.float()
    weight.unflatten(1, (-1, GROUP)).mul_(scales.unsqueeze(2))
    return weight
