"""Block quantization in plain torch: the definition."""

import torch
from torch.nn import functional

BLOCK = 128


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    padded = functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, largest / torch.finfo(torch.float8_e4m3fn).max, torch.ones_like(largest))
    values = (blocks / scale[:, None, :, None]).view_as(padded)[:rows, :columns]
    return values.to(torch.float8_e4m3fn).contiguous(), scale


def dequantize_blocks(values: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    # A strip of 128 rows at a time, so that no second copy of the matrix exists.
    for index, start in enumerate(range(0, values.shape[0], BLOCK)):
        factors = scale[index].repeat_interleave(BLOCK)[: values.shape[1]]
        out[start : start + BLOCK] = values[start : start + BLOCK].float() * factors
