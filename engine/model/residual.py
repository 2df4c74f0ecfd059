"""What layers add their outputs to, and which of its rows each rank of a TP group has."""

from collections.abc import Callable, Set
from typing import Protocol

import torch

from engine.model.activations import InputForm, Normalized, quantized_form
from engine.model.tensor_group import TensorGroup
from kernels.act_quant import quantize
from kernels.moe_gate import Listed
from kernels.moe_permute import ExpertOutputs, combine
from kernels.norm import (
    Delta,
    Matrix,
    add_rms_norm,
    add_rms_norm_and_logits,
    add_rms_norm_and_multiply,
    add_rms_norm_in_both_forms,
    add_rms_norm_quantized,
)
from kernels.peer_exchange.exchanged_norm import ExchangedNorm, SummedRows

# Adds [rows, hidden] to rows of a residual, normalizes them by a weight and an epsilon, and chooses experts.
Choose = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Listed | None]


class Residual(Protocol):
    """The residual of some tokens, to which layers add their outputs.

    An output is a `Delta`, whose rows are those of the residual, or it is `parts`, [tokens, hidden]: what this rank
    adds, for all tokens, to a sum over the ranks of its TP group. If there is one rank, parts are the sum.

    Attributes:
        everywhere: whether every rank has all rows. A layer's delta is then this rank's parts, and experts see all
        rows.
    """

    everywhere: bool

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows, of all [tokens, width], of which this rank has the residual: [own rows, width]."""
        ...

    def delta(self, parts: torch.Tensor) -> torch.Tensor:
        """The delta that stands for these parts: their sum, unless `add` makes that."""
        ...

    def add(
        self, delta: Delta, weight: torch.Tensor, forms: Set[InputForm], matrix: Matrix | None = None
    ) -> Normalized:
        """Add to the rows. Returns all tokens normalized, [tokens, hidden], in the forms that the next layer reads.

        weight: [hidden], of the norm. matrix: all that the next layer does with them is to multiply them by it, so that
        their product alone may be returned; None if that is not all.
        """
        ...

    def add_parts(self, parts: torch.Tensor, weight: torch.Tensor, forms: Set[InputForm]) -> Normalized:
        """`add` for the sum of parts."""
        ...

    def add_for_experts(
        self, parts: torch.Tensor, weight: torch.Tensor, forms: Set[InputForm], gate: torch.Tensor
    ) -> Normalized:
        """As `add_parts`, but returns this rank's rows alone, which it sends to experts: [own rows, hidden], perhaps
        with their logits. gate: the weight that makes these, [experts, hidden].
        """
        ...

    def add_and_choose(self, parts: torch.Tensor, weight: torch.Tensor, choose: Choose) -> Listed | None:
        """As `add_for_experts`, with the rows' experts, by a kernel that does all; None if `choose` has none."""
        ...

    def finish(self, delta: Delta, weight: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Add to the rows, and apply the last norm, once: [tokens, hidden], or those of some `tokens`, [rows] int64."""
        ...


def residual_rows(tokens: int, group: TensorGroup, *, divided: bool) -> int:
    """How many rows of a residual of some tokens this rank has. divided: divide even few rows."""
    return tokens if group.has_everywhere(tokens) and not divided else group.own_rows(tokens)


def begin_residual(zeros: torch.Tensor, tokens: int, epsilon: float, group: TensorGroup, *, divided: bool) -> Residual:
    """zeros: [rows, hidden], as many as `residual_rows`, which are overwritten."""
    if group.has_everywhere(tokens) and not divided:
        return EverywhereResidual(zeros, epsilon, group)
    return DividedResidual(zeros, tokens, epsilon, group)


class DividedResidual:
    """Each rank has a share of the rows, so that no row is normalized or sent to an expert twice; one rank has all."""

    everywhere = False

    def __init__(self, rows: torch.Tensor, tokens: int, epsilon: float, group: TensorGroup) -> None:
        self._rows = rows
        self._tokens = tokens
        self._epsilon = epsilon
        self._group = group

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        return self._group.own(rows)

    def delta(self, parts: torch.Tensor) -> torch.Tensor:
        return self._group.sum(parts)

    def add(
        self, delta: Delta, weight: torch.Tensor, forms: Set[InputForm], matrix: Matrix | None = None
    ) -> Normalized:
        if not self._group.divides:
            return self._multiplied(delta, weight, matrix) or self._add_own(delta, weight, forms)
        if isinstance(delta, torch.Tensor):
            made = self._exchanged(delta, weight, forms, sums=None, gathers=True)
            if made:
                return made
        plain = self._group.gather(add_rms_norm(delta, self._rows, weight, self._epsilon), self._tokens)
        form = quantized_form(forms)
        return Normalized(plain, None if form is None else quantize(plain, powers=form.powers))

    def add_parts(self, parts: torch.Tensor, weight: torch.Tensor, forms: Set[InputForm]) -> Normalized:
        made = self._exchanged(parts, weight, forms, sums=SummedRows.OWN, gathers=True)
        return made or self.add(self._group.sum(parts), weight, forms)

    def add_for_experts(
        self, parts: torch.Tensor, weight: torch.Tensor, forms: Set[InputForm], gate: torch.Tensor
    ) -> Normalized:
        made = self._exchanged(parts, weight, forms, sums=SummedRows.OWN, gathers=False)
        if made:
            return made
        delta, form = self._group.sum(parts), quantized_form(forms)
        powers = form is not None and form.powers
        gated = add_rms_norm_and_logits(
            delta, self._rows, weight, self._epsilon, gate, quantizes=form is not None, powers=powers
        )
        if gated is None:
            return self._add_own(delta, weight, forms)
        self._rows = gated.residual
        return Normalized(gated.plain, gated.quantized, gated.logits)

    def add_and_choose(self, parts: torch.Tensor, weight: torch.Tensor, choose: Choose) -> Listed | None:
        return None if self._group.divides else choose(parts, self._rows, weight, self._epsilon)

    def finish(self, delta: Delta, weight: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        if self._group.divides:
            own = add_rms_norm(delta, self._rows, weight, self._epsilon)
            hidden = self._group.gather(own, self._tokens)
            return hidden if tokens is None else hidden[tokens]
        if tokens is None:
            return add_rms_norm(delta, self._rows, weight, self._epsilon)
        return add_rms_norm(delta[tokens], self._rows[tokens], weight, self._epsilon)

    def _multiplied(self, delta: Delta, weight: torch.Tensor, matrix: Matrix | None) -> Normalized | None:
        if matrix is None:
            return None
        made = add_rms_norm_and_multiply(delta, self._rows, weight, self._epsilon, matrix)
        if made is None:
            return None
        self._rows, product = made
        return Normalized(None, None, product=product)

    def _add_own(self, delta: Delta, weight: torch.Tensor, forms: Set[InputForm]) -> Normalized:
        return _add(delta, self._rows, weight, self._epsilon, forms)

    def _exchanged(
        self,
        delta: torch.Tensor,
        weight: torch.Tensor,
        forms: Set[InputForm],
        *,
        sums: SummedRows | None,
        gathers: bool,
    ) -> Normalized | None:
        norm = _exchanged_norm(weight, self._epsilon, sums, self._tokens if gathers else None, forms)
        made = self._group.add_rms_norm(delta, self._rows, norm)
        return None if made is None else Normalized(*made)


class EverywhereResidual:
    """Few rows: each rank has all of them, and computes what its experts make of all. A layer then has two exchanges,
    each a sum followed by the norm, instead of four.
    """

    everywhere = True

    def __init__(self, rows: torch.Tensor, epsilon: float, group: TensorGroup) -> None:
        self._rows = rows
        self._epsilon = epsilon
        self._group = group

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def delta(self, parts: torch.Tensor) -> torch.Tensor:
        return parts

    def add(
        self, delta: Delta, weight: torch.Tensor, forms: Set[InputForm], matrix: Matrix | None = None
    ) -> Normalized:
        return self._added(delta, self._rows, weight, forms)

    add_parts = add

    def add_for_experts(
        self, parts: torch.Tensor, weight: torch.Tensor, forms: Set[InputForm], gate: torch.Tensor
    ) -> Normalized:
        return self.add(parts, weight, forms)

    def add_and_choose(self, parts: torch.Tensor, weight: torch.Tensor, choose: Choose) -> Listed | None:
        return None

    def finish(self, delta: Delta, weight: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        rows = self._rows
        if tokens is not None:
            delta, rows = delta[tokens], rows[tokens]
        return self._added(delta, rows, weight, frozenset({InputForm.PLAIN})).unquantized()

    def _added(self, delta: Delta, rows: torch.Tensor, weight: torch.Tensor, forms: Set[InputForm]) -> Normalized:
        norm = _exchanged_norm(weight, self._epsilon, SummedRows.ALL, None, forms)
        made = self._group.add_rms_norm(delta, rows, norm)
        if made is not None:
            return Normalized(*made)
        parts = combine(delta) if isinstance(delta, ExpertOutputs) else delta
        return _add(self._group.sum_everywhere(parts), rows, weight, self._epsilon, forms)


def _add(delta: Delta, rows: torch.Tensor, weight: torch.Tensor, epsilon: float, forms: Set[InputForm]) -> Normalized:
    if (form := quantized_form(forms)) is None:
        return Normalized(add_rms_norm(delta, rows, weight, epsilon), None)
    if InputForm.PLAIN not in forms:
        return Normalized(None, add_rms_norm_quantized(delta, rows, weight, epsilon, powers=form.powers))
    return Normalized(*add_rms_norm_in_both_forms(delta, rows, weight, epsilon, powers=form.powers))


def _exchanged_norm(
    weight: torch.Tensor, epsilon: float, sums: SummedRows | None, all_rows: int | None, forms: Set[InputForm]
) -> ExchangedNorm:
    plain, form = InputForm.PLAIN in forms, quantized_form(forms)
    return ExchangedNorm(weight, epsilon, sums, all_rows, plain, form is not None, form is not None and form.powers)
