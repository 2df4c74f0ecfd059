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
    # 128 rows at a time, which a CPU's cache holds. To a GPU the launches would take longer than the work.
    height = BLOCK if values.device.type == "cpu" else max(len(values), 1)
    for start in range(0, len(values), height):
        part = values[start : start + height]
        factors = scale[start // BLOCK : -(-(start + len(part)) // BLOCK)].repeat_interleave(BLOCK, 1)
        if len(factors) > 1:
            factors = factors.repeat_interleave(BLOCK, 0)[: len(part)]
        out[start : start + height] = part.float() * factors[:, : values.shape[1]]
