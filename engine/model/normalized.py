"""What a norm leaves, in the forms that the layers behind it read."""

from dataclasses import dataclass

import torch

from engine.model.activations import Activations, InputForm
from kernels.act_quant import Quantized


@dataclass(frozen=True, slots=True)
class Normalized:
    # [tokens, hidden]
    plain: torch.Tensor
    # The same in groups of FP8; None if no layer behind reads it.
    quantized: Quantized | None

    @property
    def tokens(self) -> int:
        return self.plain.shape[0]

    def in_form(self, form: InputForm) -> Activations:
        """form: one of those that were asked for."""
        if form is InputForm.PLAIN:
            return self.plain
        assert self.quantized is not None
        return self.quantized

    def rows(self, rows: slice) -> "Normalized":
        """Some of the tokens, which begin at a multiple of `SCALE_ALIGNMENT` if they are quantized."""
        return Normalized(self.plain[rows], None if self.quantized is None else self.quantized[rows])
