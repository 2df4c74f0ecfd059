"""The ranks that hold a model's routed experts together (expert parallelism, GShard, 2020).

Few ranks exchange all their rows. Each adds up what its experts make of the rows of all, and the sums travel back.
That moves no more than one copy of a row for each expert that it chose, and every size is known beforehand. Between
hosts DeepEP sends rows only where they are wanted, if all ranks have the package.
"""

from typing import NamedTuple, TypeVar

import torch

from engine.exchange.interface import Begun, RankExchange
from engine.exchange.turns import StepTurns
from engine.model.activations import Sent
from engine.model.deep_ep import DeepEp
from engine.model.share import ModelShare
from engine.parallel.layout import Group
from kernels.act_quant import empty_quantized
from kernels.moe_permute import ExpertOutputs, combine
from kernels.w4a8_gemm import ScaledRows

ResultT = TypeVar("ResultT")


class Dispatched(NamedTuple):
    """Rows that this rank's experts may compute: the rows of all ranks; or, with DeepEP, the rows for which one of them
    was chosen, and perhaps rows that no rank sent, which have no expert.
    """

    rows: Sent
    # Both [rows, k].
    weights: torch.Tensor
    choices: torch.Tensor
    # For DeepEP, how sums get back to the ranks of the rows; None if all ranks have the rows of all, in order.
    way_back: object = None


class ExpertGroup:
    """Every rank of the worker makes the same calls in the same order, with equally many rows.

    Attributes:
        ranks: how many there are.
        rank: which of them this is.
        share: which of the experts this rank holds.
        width_share: which part of their width, since neighbours share experts if there are fewer parts than ranks.
        divides: whether there is more than one rank.
        turns: of a step's parts, which pass where one waits for an exchange that it has begun here.
    """

    def __init__(self, exchange: RankExchange, deep_ep: DeepEp | None = None) -> None:
        """deep_ep: carries rows where it can; None leaves all to the exchange."""
        place, layout = exchange.place, exchange.place.layout
        self._exchange = exchange
        self.ranks, self.rank = layout.world, place.rank
        self.share = ModelShare(place.expert_part, layout.ep)
        self.width_share = ModelShare(place.width_part, layout.width_parts)
        self.divides = layout.world > 1
        self.turns = StepTurns()
        self._deep_ep = deep_ep

    @property
    def uses_deep_ep(self) -> bool:
        return self._deep_ep is not None

    @property
    def overlaps(self) -> bool:
        """Whether dispatched rows travel while this rank computes."""
        return self.turns.taken or self._exchange.overlaps

    def begin_dispatch(self, rows: Sent, weights: torch.Tensor, choices: torch.Tensor) -> Begun[Dispatched]:
        """The rows of all ranks, in the form they are given in, and their experts: [rows, ...] each becomes
        [ranks * rows, ...], or what DeepEP brings.
        """
        if self._deep_ep is not None and self._deep_ep.takes(rows):
            sent = self._deep_ep.begin_dispatch(rows, weights, choices)
            return Begun(lambda: Dispatched(*self._finish(sent)))
        everybody = self._room_for(rows)
        outputs = [*_tensors(everybody), self._room(weights), self._room(choices)]
        begun = self._exchange.begin_all_gather(
            outputs, [*_tensors(rows), weights, choices], Group.WORLD, overlap=self.turns.taken
        )

        def collect() -> Dispatched:
            self._finish(begun)
            return Dispatched(everybody, outputs[-2], outputs[-1])

        return Begun(collect)

    def sum(self, routed: ExpertOutputs, dispatched: Dispatched, shared: torch.Tensor) -> torch.Tensor:
        """The sums of what all ranks' experts make of this rank's rows, and of `shared`: [rows, width].

        routed: what this rank's experts make of the dispatched rows. Parts travel in the model's dtype: bfloat16 is
        half as many bytes, and each part is rounded as their sum is.
        """
        if dispatched.way_back is None:
            parts = combine(routed, shared, self.rank * len(shared))
            # The parts stand for it from here on. It is large, and the caller keeps none.
            del routed
            return self.sum_parts(parts)
        assert self._deep_ep is not None
        return self._finish(self._deep_ep.begin_combine(combine(routed), dispatched.way_back)) + shared

    def sum_parts(self, parts: torch.Tensor) -> torch.Tensor:
        """The sums of all ranks' parts of this rank's rows: [ranks * rows, width] becomes [rows, width]."""
        return self._finish(self._exchange.begin_reduce_scatter(parts, Group.WORLD, overlap=self.turns.taken))

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks: [rows, ...] becomes [ranks * rows, ...]."""
        return self._exchange.all_gather(own, Group.WORLD)

    def meet(self) -> None:
        """Wait until all ranks' hosts are here."""
        self._of_all(0)

    def least(self, count: int) -> int:
        """The least of all ranks' counts, which the hosts exchange."""
        return int(min(self._of_all(count)))

    def largest(self, value: float) -> float:
        """The largest of all ranks' values."""
        return max(self._of_all(value))

    def _finish(self, begun: Begun[ResultT]) -> ResultT:
        """The step's other parts are computed until it is this one's turn again."""
        self.turns.wait()
        return begun.finish()

    def _of_all(self, value: float) -> list[float]:
        return self._exchange.all_gather(torch.tensor([value], dtype=torch.float64), Group.WORLD).tolist()

    def _room_for(self, rows: Sent) -> Sent:
        if isinstance(rows, torch.Tensor):
            return self._room(rows)
        if isinstance(rows, ScaledRows):
            scales = rows.scales if rows.static else self._room(rows.scales)
            return ScaledRows(self._room(rows.values), scales, rows.static)
        tokens, width = rows.values.shape
        return empty_quantized(self.ranks * tokens, width, device=rows.values.device)

    def _room(self, own: torch.Tensor) -> torch.Tensor:
        return own.new_empty(self.ranks * own.shape[0], *own.shape[1:])


def _tensors(rows: Sent) -> list[torch.Tensor]:
    if isinstance(rows, torch.Tensor):
        return [rows]
    return [rows.values] if isinstance(rows, ScaledRows) and rows.static else [rows.values, rows.scales]
