"""The ranks that compute the same tokens together (tensor parallelism, Megatron-LM, 2021, with divided rows as in
"Reducing Activation Recomputation in Large Transformer Models", 2022).

Each rank has a share of the heads, of the dense layers' width and of the vocabulary. Between these layers, where the
residual is added and experts are chosen, each has a share of the rows, or few rows whole (engine.model.residual).
"""

import torch
from torch.nn import functional

from engine.exchange.interface import RankExchange
from engine.model.share import ModelShare
from engine.parallel.layout import Group
from kernels.act_quant import Quantized
from kernels.norm import Delta
from kernels.peer_exchange.exchanged_norm import ExchangedNorm, SummedRows

# Up to this many rows, a sum of all rows on every rank takes less time than a share of it on each and a gather.
FEW_ROWS = 32


class TensorGroup:
    """Every rank of the group makes the same calls in the same order.

    Attributes:
        share: which part of the model this rank has.
        divides: whether there is more than one rank.
        leads: whether this is the first rank.
    """

    def __init__(self, exchange: RankExchange) -> None:
        place = exchange.place
        self._exchange = exchange
        self.share = ModelShare(place.tp_index, place.layout.tp)
        self.divides = self.share.count > 1
        # If so, no rank outside the group has experts, and no row needs to be sent to one.
        self._is_whole_worker = place.layout.dp == 1
        self.leads = place.leads

    def has_everywhere(self, tokens: int) -> bool:
        """Whether every rank has all rows of the residual of a step with this many tokens."""
        return self.divides and self._is_whole_worker and tokens <= FEW_ROWS

    def own_rows(self, tokens: int) -> int:
        """How many of the rows of `tokens` tokens each rank has; the last ones may be padding."""
        return -(-tokens // self.share.count)

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's share of rows that all ranks have: [tokens, width] becomes [own rows, width]."""
        if not self.divides:
            return rows
        padded = self._padded(rows)
        return padded[self.share.of(len(padded))]

    def sum(self, parts: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum of all ranks' parts: [tokens, width] becomes [own rows, width].

        Every rank adds in the order of the ranks, so that the sums do not depend on who has a row.
        """
        return self._exchange.begin_reduce_scatter(self._padded(parts), Group.TP).finish() if self.divides else parts

    def sum_everywhere(self, parts: torch.Tensor) -> torch.Tensor:
        """As `sum`, but all rows on every rank: [tokens, width] stays as it is."""
        return self._exchange.all_reduce(parts, Group.TP) if self.divides else parts

    def gather(self, own: torch.Tensor, tokens: int) -> torch.Tensor:
        """All ranks' rows: [own rows, width] becomes [tokens, width]."""
        return self._exchange.all_gather(own, Group.TP)[:tokens] if self.divides else own

    def add_rms_norm(
        self, delta: Delta, residual: torch.Tensor, norm: ExchangedNorm
    ) -> tuple[torch.Tensor | None, Quantized | None] | None:
        """Add `delta` to this rank's rows of the residual and normalize them, with a sum before or a `gather` after.

        Only for few rows on a GPU; returns None otherwise.
        """
        if not self.divides:
            return None
        given = delta
        if norm.sums is SummedRows.OWN:
            assert isinstance(delta, torch.Tensor)
            given = self._padded(delta)
        return self._exchange.add_rms_norm(given, residual, norm, Group.TP)

    def join_columns(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' columns of the same rows: [rows, width] becomes [rows, ranks * width]."""
        if not self.divides:
            return part
        joined = self._exchange.all_gather(part, Group.TP).view(self.share.count, *part.shape)
        return joined.transpose(0, 1).flatten(1)

    def from_first(self, values: torch.Tensor) -> torch.Tensor:
        """The first rank's values; the others give tensors of the same shape and dtype."""
        return self._exchange.broadcast(values, Group.TP, 0) if self.divides else values

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        missing = self.own_rows(len(rows)) * self.share.count - len(rows)
        return functional.pad(rows, (0, 0, 0, missing)) if missing else rows
