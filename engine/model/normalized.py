"""What a norm leaves, in the forms that the layers behind it read."""

from collections.abc import Set
from dataclasses import dataclass

import torch

from engine.model.activations import Activations, InputForm
from engine.model.tensor_group import TensorGroup
from kernels.act_quant import Quantized, quantize
from kernels.norm import Delta, add_rms_norm, add_rms_norm_quantized
from kernels.peer_exchange.exchanged_norm import ExchangedNorm


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
        """Some of the tokens, quantized again: their scales must lie one after another."""
        plain = self.plain[rows]
        return Normalized(plain, None if self.quantized is None else quantize(plain))


def add_and_normalize(
    delta: Delta, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, forms: Set[InputForm]
) -> Normalized:
    """Add `delta` to `residual` in place, and normalize the sum in the forms that the next layer reads.

    delta, residual: [tokens, hidden]; weight: [hidden].
    """
    if InputForm.FP8_GROUPS in forms:
        return Normalized(*add_rms_norm_quantized(delta, residual, weight, epsilon))
    return Normalized(add_rms_norm(delta, residual, weight, epsilon), None)


def sum_and_normalize(
    parts: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    forms: Set[InputForm],
    group: TensorGroup,
) -> Normalized:
    """`add_and_normalize` of this rank's rows of the sum of all ranks' parts, [tokens, hidden]."""
    norm = ExchangedNorm(weight, epsilon, sums=True, all_rows=None, quantizes=InputForm.FP8_GROUPS in forms)
    made = group.add_rms_norm(parts, residual, norm)
    return Normalized(*made) if made else add_and_normalize(group.sum(parts), residual, weight, epsilon, forms)


def add_normalize_and_gather(
    delta: Delta,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    forms: Set[InputForm],
    group: TensorGroup,
    tokens: int,
) -> Normalized:
    """`add_and_normalize` of this rank's rows, and all `tokens` rows of its group."""
    if not group.divides:
        return add_and_normalize(delta, residual, weight, epsilon, forms)
    quantizes = InputForm.FP8_GROUPS in forms
    if isinstance(delta, torch.Tensor):
        norm = ExchangedNorm(weight, epsilon, sums=False, all_rows=tokens, quantizes=quantizes)
        made = group.add_rms_norm(delta, residual, norm)
        if made:
            return Normalized(*made)
    plain = group.gather(add_rms_norm(delta, residual, weight, epsilon), tokens)
    return Normalized(plain, quantize(plain) if quantizes else None)


def sum_normalize_and_gather(
    parts: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    forms: Set[InputForm],
    group: TensorGroup,
    tokens: int,
) -> Normalized:
    """`add_normalize_and_gather` of the sum of all ranks' parts, [tokens, hidden]."""
    norm = ExchangedNorm(weight, epsilon, sums=True, all_rows=tokens, quantizes=InputForm.FP8_GROUPS in forms)
    made = group.add_rms_norm(parts, residual, norm)
    if made:
        return Normalized(*made)
    return add_normalize_and_gather(group.sum(parts), residual, weight, epsilon, forms, group, tokens)
