"""NVFP4 in plain torch, the definition (NVIDIA, "Introducing NVFP4", 2025; OCP Microscaling's e2m1)."""

import torch

GROUP = 16
# Magnitudes by the three low bits of a code; the fourth bit is the sign.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST_CODE = MAGNITUDES[-1]
LARGEST_SCALE = torch.finfo(torch.float8_e4m3fn).max


def quantize_nvfp4(
    weight: torch.Tensor, largest: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = weight.float().unflatten(1, (-1, GROUP))
    highs = groups.abs().amax(dim=2)
    if largest is None:
        largest = highs.max() if highs.numel() else highs.new_zeros(())
    global_scale = torch.where(largest > 0, largest / (LARGEST_CODE * LARGEST_SCALE), torch.ones_like(largest))
    scales = (highs / LARGEST_CODE / global_scale).to(torch.float8_e4m3fn)
    steps = (scales.float() * global_scale).unsqueeze(2)
    # A scale that rounds to zero leaves zeros.
    shares = torch.where(steps > 0, groups / steps, 0.0)
    codes = _nearest(shares.abs()) | (shares < 0).to(torch.uint8) << 3
    codes = codes.flatten(1)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales, global_scale


def _nearest(shares: torch.Tensor) -> torch.Tensor:
    """The code of the nearest magnitude: the even one for a value halfway between two, the largest for larger ones."""
    magnitudes = torch.tensor(MAGNITUDES, device=shares.device)
    halfway = (magnitudes[1:] + magnitudes[:-1]) / 2
    # A value on a bound gets the lower code. Above odd codes the bound lies just below halfway, so that it gets the
    # even one there.
    halfway[1::2] = torch.nextafter(halfway[1::2], magnitudes[:1])
    return torch.bucketize(shares, halfway, out_int32=True).to(torch.uint8)


def dequantize_nvfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    halves = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    magnitudes = torch.tensor(MAGNITUDES, device=codes.device)[(halves & 7).long()]
    values = torch.where(halves >= 8, -magnitudes, magnitudes)
    values.unflatten(-1, (-1, GROUP)).mul_(scales.float().unsqueeze(-1))
    return values
