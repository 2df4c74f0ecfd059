"""Quantization of activations in plain torch: the definition."""

import torch

from kernels.act_quant.quantized import GROUP, Quantized, QuantizedRows, empty_quantized

# The smallest magnitude that a group is scaled for: its scale must not underflow. A group of zeros quantizes to zeros.
SMALLEST = 1e-10


def quantize(x: torch.Tensor, *, powers: bool = False) -> Quantized:
    out = empty_quantized(*x.shape, device=x.device, powers=powers)
    quantize_into(x, QuantizedRows(out.values, out.scales, powers))
    return out


def quantize_into(x: torch.Tensor, out: QuantizedRows) -> None:
    groups = x.float().unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(dim=-1).clamp(min=SMALLEST) / torch.finfo(torch.float8_e4m3fn).max
    if out.powers:
        scales = least_power(scales)
    out.scales.copy_(scales)
    out.values.copy_((groups / scales.unsqueeze(-1)).flatten(-2))


def least_power(x: torch.Tensor) -> torch.Tensor:
    """The least powers of two that are not smaller; x: positive float32."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())


def dequantize(x: Quantized) -> torch.Tensor:
    groups: torch.Tensor = x.values.float().unflatten(-1, (-1, GROUP))
    return (groups * x.scales.unsqueeze(-1)).flatten(-2)
