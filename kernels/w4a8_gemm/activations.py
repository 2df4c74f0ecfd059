"""Activations in FP8 whose scale does not vary along a row."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """x ~ values * scale, one scale for each row, or for all rows of an expert."""

    # [rows, width] or [experts, capacity, width] float8_e4m3fn, contiguous.
    values: torch.Tensor
    # float32, contiguous: [experts] (static, from calibration) or the values' leading dimensions (per token).
    scales: torch.Tensor
    # Whether `scales` are one for each expert (static) or one for each row.
    static: bool

    def __post_init__(self) -> None:
        assert self.values.dtype == torch.float8_e4m3fn and self.values.is_contiguous()
        assert self.scales.dtype == torch.float32 and self.scales.is_contiguous()
        assert self.scales.dim() == 1 if self.static else self.scales.shape == self.values.shape[:-1]
