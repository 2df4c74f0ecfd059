"""The forms in which layers take their input, as norms leave it."""

from collections.abc import Set
from dataclasses import dataclass
from enum import Enum, auto

import torch

from kernels.act_quant import Quantized, QuantizedRows, quantize, quantize_into
from kernels.w4a8_gemm import ScaledRows


class InputForm(Enum):
    # The model's dtype.
    PLAIN = auto()
    # e4m3 with a float32 scale for each row and 128 channels (`Quantized`).
    FP8_GROUPS = auto()
    # The same with scales that are powers of two.
    FP8_POWERS = auto()

    @property
    def quantized(self) -> bool:
        return self is not InputForm.PLAIN

    @property
    def powers(self) -> bool:
        """Whether scales are powers of two, as kernels ask."""
        return self is InputForm.FP8_POWERS


Activations = torch.Tensor | Quantized
# Some rows of activations, which are written; [rows, width] in their form.
WrittenRows = torch.Tensor | QuantizedRows
# What travels to experts on other ranks.
Sent = Activations | ScaledRows


def in_form(x: Activations, form: InputForm) -> Activations:
    """x: [tokens, width] in this form, or plain: then it is quantized."""
    if isinstance(x, torch.Tensor):
        return quantize(x, powers=form.powers) if form.quantized else x
    assert form.quantized and x.powers == form.powers
    return x


def written_rows(x: Activations, first: int, stop: int) -> WrittenRows:
    """Rows [first, stop) of x: [tokens, width], to be written."""
    return x[first:stop] if isinstance(x, torch.Tensor) else x.rows(first, stop)


def write(values: torch.Tensor, out: WrittenRows) -> None:
    """Write values, [rows, width], in the form that the rows have."""
    if isinstance(out, torch.Tensor):
        out.copy_(values)
    else:
        quantize_into(values, out)


def clear(out: WrittenRows) -> None:
    """Make all of the rows zero."""
    if isinstance(out, torch.Tensor):
        out.zero_()
    else:
        out.clear()


def quantized_form(forms: Set[InputForm]) -> InputForm | None:
    """The one among the forms that is quantized: layers that read the same rows read them in the same one."""
    found = [form for form in forms if form.quantized]
    assert len(found) <= 1
    return found[0] if found else None


@dataclass(frozen=True, slots=True)
class Normalized:
    """The output of a norm: [tokens, hidden], in one form or both; a form is None if no layer reads it."""

    # In the model's dtype.
    plain: torch.Tensor | None
    # In groups of FP8.
    quantized: Quantized | None
    # Logits of the layer's gate, as `kernels.moe_gate.moe_gate` takes them, if the norm's kernel computed them too.
    logits: torch.Tensor | None = None
    # The product by the next layer's first weight, if the norm's kernel computed it: then there may be no form.
    product: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        values = self.plain if self.quantized is None else self.quantized.values
        assert values is not None
        return values.shape[0]

    def unquantized(self) -> torch.Tensor:
        """The plain form, if a layer asked for it."""
        assert self.plain is not None
        return self.plain

    def in_form(self, form: InputForm) -> Activations:
        """The tokens in a form that a layer asked for."""
        if form is InputForm.PLAIN:
            return self.unquantized()
        assert self.quantized is not None
        return self.quantized

    def rows(self, rows: slice) -> "Normalized":
        """Some of the tokens, which begin at a multiple of `SCALE_ALIGNMENT` if they are quantized."""
        plain, quantized = self.plain, self.quantized
        return Normalized(None if plain is None else plain[rows], None if quantized is None else quantized[rows])
