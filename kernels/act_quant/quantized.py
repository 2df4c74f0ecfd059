"""Activations in FP8: e4m3 values in groups of 128 along a row, with one float32 scale a group."""

from dataclasses import dataclass

import torch

GROUP = 128
# The bulk copy engine requires each column of scales to begin at a multiple of 16 bytes.
SCALE_ALIGNMENT = 4


@dataclass(frozen=True, slots=True)
class Quantized:
    """x ~ values * scales, each scale over its group of 128 values. Two-dimensional, or with a leading expert.

    `empty_quantized` makes it.
    """

    # [..., rows, width] float8_e4m3fn, contiguous.
    values: torch.Tensor
    # [..., rows, width / 128] float32; rows lie next to each other (stride 1), columns 16-byte aligned.
    scales: torch.Tensor
    # Whether scales are powers of two (ue8m0), rounded up: whoever quantizes into it heeds this.
    powers: bool = False

    def __getitem__(self, rows: slice) -> "Quantized":
        """Some of the rows of a two-dimensional one, which begin at a multiple of `SCALE_ALIGNMENT`."""
        first, _, step = rows.indices(self.values.shape[0])
        assert first % SCALE_ALIGNMENT == 0 and step == 1
        return Quantized(self.values[rows], self.scales[rows], self.powers)

    def rows(self, first: int, stop: int) -> "QuantizedRows":
        """Some of the rows of a two-dimensional one, or all, to be written."""
        if stop - first == self.values.shape[0]:
            return QuantizedRows(self.values, self.scales, self.powers)
        return QuantizedRows(self.values[first:stop], self.scales[first:stop], self.powers)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows of a `Quantized`, which may begin anywhere: kernels write them one by one."""

    # [..., rows, width] float8_e4m3fn, last dimension contiguous.
    values: torch.Tensor
    # [..., rows, width / 128] float32; rows lie next to each other, columns as far apart as those of all rows.
    scales: torch.Tensor
    # As in `Quantized`.
    powers: bool = False

    def clear(self) -> None:
        """Make all of them zero."""
        # As bytes: few operations support one-byte floats.
        self.values.view(torch.uint8).zero_()
        self.scales.fill_(1.0)

    def columns(self, first: int, stop: int) -> "QuantizedRows":
        """Some of the columns of these rows, in whole groups."""
        assert first % GROUP == stop % GROUP == 0
        if stop - first == self.values.shape[-1]:
            return self
        scales = self.scales[..., first // GROUP : stop // GROUP]
        return QuantizedRows(self.values[..., first:stop], scales, self.powers)


def aligned_rows(rows: int) -> int:
    """Distance between two columns of scales, in scales."""
    return max(-(-rows // SCALE_ALIGNMENT), 1) * SCALE_ALIGNMENT


def cuda_macros(powers: bool) -> tuple[str, ...]:
    """For `load_kernel` of a source that quantizes into a `Quantized` with `powers`: see `hopper.cuh`."""
    return ("POWER_SCALES",) if powers else ()


def empty_quantized(*shape: int, device: torch.device, powers: bool = False) -> Quantized:
    """Uninitialised; shape: [rows, width] or [experts, rows, width], width a multiple of 128."""
    *leading, rows, width = shape
    assert width % GROUP == 0
    column = aligned_rows(rows)
    scales = torch.empty(*leading, width // GROUP, column, dtype=torch.float32, device=device).mT
    return Quantized(
        values=torch.empty(shape, dtype=torch.float8_e4m3fn, device=device),
        scales=scales if column == rows else scales[..., :rows, :],
        powers=powers,
    )
