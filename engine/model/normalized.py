"""What a norm leaves, in the forms that the layers behind it read."""

from dataclasses import dataclass

import torch

from kernels.act_quant import Quantized, quantize
from kernels.norm import Delta, add_rms_norm, add_rms_norm_quantized


@dataclass(frozen=True, slots=True)
class Normalized:
    # [tokens, hidden]
    plain: torch.Tensor
    # The same in FP8, where a layer behind multiplies FP8.
    quantized: Quantized | None

    @property
    def tokens(self) -> int:
        return self.plain.shape[0]

    def for_layer(self, quantized: bool) -> torch.Tensor | Quantized:
        """In the form that a layer takes."""
        if not quantized:
            return self.plain
        assert self.quantized is not None
        return self.quantized

    def rows(self, rows: slice) -> "Normalized":
        """Of some tokens; quantized anew, since scales of some tokens do not lie as those of all."""
        plain = self.plain[rows]
        return Normalized(plain, None if self.quantized is None else quantize(plain))


def add_and_normalize(
    delta: Delta, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, *, quantized: bool
) -> Normalized:
    """Adds `delta` to `residual` in place; the sum normalized. All [tokens, hidden]; weight: [hidden]."""
    if quantized:
        return Normalized(*add_rms_norm_quantized(delta, residual, weight, epsilon))
    return Normalized(add_rms_norm(delta, residual, weight, epsilon), None)
