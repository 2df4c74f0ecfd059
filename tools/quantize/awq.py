"""AWQ (Lin et al., "AWQ: Activation-aware Weight Quantization", 2024): rounds the weights of loud channels more finely.

A channel's weights are multiplied by a power of the channel's mean magnitude before they are rounded, and its
activations are divided by it. The power is the one with the least error of the outputs on calibration data; 0 is plain
rounding. Then the largest weights of a group are clipped as far as that lowers the error, in which each input is
weighted by its mean square.
"""

from collections.abc import Iterable, Sequence

import torch

from kernels.group_quant import dequantize_groups, quantize_groups

POWERS = tuple(index / 20 for index in range(20))
# Most rows of one expert that the search uses; more rows change the estimated error little.
MOST_ROWS = 512


def candidates(magnitudes: torch.Tensor) -> list[torch.Tensor]:
    """Factors of the activations' channels to try, one for each power. magnitudes: [width], mean of each channel."""
    found = []
    for power in POWERS:
        scale = magnitudes.clamp(min=1e-4) ** power
        # The factors lie around 1, so that the weights to be rounded keep their magnitude.
        found.append((scale.max() * scale.min()).sqrt() / scale)
    return found


def best_pre_scale(magnitudes: torch.Tensor, products: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The candidate with the least error of the outputs, summed over products: [width].

    products: inputs [rows, width] float32 and the weight [outputs, width] that multiplies them.
    """
    tried = candidates(magnitudes)
    errors = torch.zeros(len(tried), device=magnitudes.device)
    for rows, weight in products:
        errors += output_errors(rows[:MOST_ROWS], weight, tried)
    return tried[int(errors.argmin())]


def output_errors(rows: torch.Tensor, weight: torch.Tensor, pre_scales: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of the squared errors of rows @ weight.T for each pre-scale: [pre_scales]."""
    errors = [
        torch.linalg.vector_norm(rows @ (rounded(weight, pre_scale) - weight).t()) ** 2 for pre_scale in pre_scales
    ]
    return torch.stack(errors)


def rounded(weight: torch.Tensor, pre_scale: torch.Tensor) -> torch.Tensor:
    """The weight in float32 after rounding it to INT4 with this pre-scale of its inputs."""
    return dequantize_groups(*quantize_groups(weight / pre_scale)).mul_(pre_scale)
