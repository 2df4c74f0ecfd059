"""What a model asks of the other ranks."""

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.exchange.begun import Begun
from engine.parallel.layout import Group, Place
from kernels.act_quant import Quantized
from kernels.norm import Delta
from kernels.peer_exchange.exchanged_norm import ExchangedNorm

# How long a GPU waits for another rank's while ranks load and compile, each at its own pace.
STARTING_SECONDS = 120.0


class Exchange(Protocol):
    """Every rank of a group makes the same calls in the same order, with tensors of one shape and dtype.

    Results are new tensors, or the given ones in a group of one rank; nobody changes the given ones. Every call raises
    RankLost if another rank has ended or hangs. On a GPU that shows only later, in a later call or in `check`: the
    host does not wait for results, which are worthless then.

    Attributes:
        place: this rank's.
    """

    place: Place

    def all_gather(self, part: torch.Tensor, group: Group) -> torch.Tensor:
        """The parts of all ranks, in the order of their ranks: [rows, ...] becomes [ranks * rows, ...].

        Bit for bit, but what is not a number may become another that is none.
        """
        ...

    def begin_all_gather(
        self, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group: Group, *, beside: bool = False
    ) -> Begun[None]:
        """`all_gather` of several tensors at once, each into its output.

        A part and its output are both contiguous, or both matrices whose rows lie next to each other (stride 1).
        beside: what this rank computes before `finish` is not to wait for the exchange: on a GPU that takes a stream of
        its own. Until it is finished, all exchanges of its group are begun so.
        """
        ...

    def begin_reduce_scatter(self, values: torch.Tensor, group: Group, *, beside: bool = False) -> Begun[torch.Tensor]:
        """This rank's part of the sum of all ranks' values: [ranks * rows, ...] becomes [rows, ...].

        beside: as above.
        """
        ...

    def all_reduce(self, values: torch.Tensor, group: Group) -> torch.Tensor:
        """The sum of all ranks' values. Every rank adds in the order of the ranks: their sums are equal bit by bit."""
        ...

    def add_rms_norm(
        self, delta: Delta, residual: torch.Tensor, norm: ExchangedNorm, group: Group
    ) -> tuple[torch.Tensor | None, Quantized | None] | None:
        """Add `delta` to this rank's rows of the residual in place, and normalize them, with the norm's exchanges.

        None, and nothing done, if this exchange does not do these at once.
        delta: [ranks * rows, width] if each rank gets its own rows of the sum, else [rows, width] as residual, and then
        perhaps experts' outputs.
        """
        ...

    def broadcast(self, values: torch.Tensor, group: Group, source: int) -> torch.Tensor:
        """The values of one rank; source: its index in the group. Of the others only shape and dtype count."""
        ...

    def copy_between(self, tensors: Sequence[torch.Tensor], group: Group, sources: Sequence[int]) -> None:
        """Fill each rank's tensors with those of the rank that `sources` has for it, an index in the group as its own.

        In place, the one exception to what is said above. Only ranks that are not their own source receive, all at
        once, so that two may swap. tensors: at most six, each contiguous.
        """
        ...

    def barrier(self, group: Group) -> None:
        """Wait until all ranks of the group are here; on a GPU its stream waits, not the host."""
        ...

    def check(self) -> None:
        """Raise RankLost if the GPU has waited for a rank in vain. To be called when a step's results have come."""
        ...
