"""The calls by which ranks of a worker exchange tensors."""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from engine.parallel.layout import Group, Place
from kernels.act_quant import Quantized
from kernels.norm import Delta
from kernels.peer_exchange.exchanged_norm import ExchangedNorm

ResultT = TypeVar("ResultT")

# How long a GPU waits for another rank's GPU while ranks load and compile, each at its own pace.
STARTING_SECONDS = 120.0


class Begun(Generic[ResultT]):
    """An exchange that is under way while its rank computes."""

    def __init__(self, collect: Callable[[], ResultT], reads: object = None) -> None:
        """collect: called once, by the first `finish`; reads: what the exchange reads, kept until then."""
        self._collect: Callable[[], ResultT] | None = collect
        self._reads = reads

    def finish(self) -> ResultT:
        """Wait for the exchange; on a GPU the current stream waits, not the host. Raises RankLost."""
        if self._collect is not None:
            self._result = self._collect()
            self._collect = self._reads = None
        return self._result


class RankExchange(Protocol):
    """Every rank of a group makes the same calls in the same order, with tensors of the same shapes and dtypes.

    Results are new tensors, or the given ones in a group of one rank. Only `copy_between` changes the given ones. Every
    call raises RankLost if another rank has ended or hangs. On a GPU a later call or `check` raises it: the host does
    not wait for results, which are invalid then.

    Attributes:
        place: this rank's place.
        overlaps: whether what is begun without `overlap` travels while this rank computes, too.
    """

    place: Place
    overlaps: bool

    def all_gather(self, part: torch.Tensor, group: Group) -> torch.Tensor:
        """The parts of all ranks, in the order of their ranks: [rows, ...] becomes [ranks * rows, ...].

        Bits stay as they are, except that one NaN may become another.
        """
        ...

    def begin_all_gather(
        self, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group: Group, *, overlap: bool = False
    ) -> Begun[None]:
        """`all_gather` of several tensors at once, each into its output.

        A part and its output are both contiguous, or both matrices whose rows lie next to each other (stride 1).
        overlap: what this rank computes before `finish` must not wait for the exchange, which therefore runs on a
        stream of its own on a GPU. Until it is finished, all exchanges of its group must be begun with `overlap`.
        """
        ...

    def begin_reduce_scatter(self, values: torch.Tensor, group: Group, *, overlap: bool = False) -> Begun[torch.Tensor]:
        """This rank's part of the sum of all ranks' values: [ranks * rows, ...] becomes [rows, ...].

        overlap: as in `begin_all_gather`.
        """
        ...

    def all_reduce(self, values: torch.Tensor, group: Group) -> torch.Tensor:
        """The sum of all ranks' values. Every rank adds in the order of the ranks: their sums are equal bit by bit."""
        ...

    def add_rms_norm(
        self, delta: Delta, residual: torch.Tensor, norm: ExchangedNorm, group: Group
    ) -> tuple[torch.Tensor | None, Quantized | None] | None:
        """Add `delta` to this rank's rows of the residual in place, and normalize them, with the norm's exchanges.

        Returns None, and does nothing, if this exchange cannot do all of this at once. delta: [ranks * rows, width] if
        each rank gets its own rows of the sum; else [rows, width] like `residual`, and then perhaps experts' outputs.
        """
        ...

    def broadcast(self, values: torch.Tensor, group: Group, source: int) -> torch.Tensor:
        """The values of one rank; source: its index in the group. Other ranks' values give only shape and dtype."""
        ...

    def copy_between(self, tensors: Sequence[torch.Tensor], group: Group, sources: Sequence[int]) -> None:
        """Fill each rank's tensors with those of its source. sources: by index in the group, the index of the source.

        Only ranks that are not their own source receive, all at once, so that two may swap. tensors: at most six, each
        contiguous.
        """
        ...

    def barrier(self, group: Group) -> None:
        """Wait until all ranks of the group are here; on a GPU its stream waits, not the host."""
        ...

    def check(self) -> None:
        """Raise RankLost if the GPU has waited for a rank in vain. To be called when a step's results have arrived."""
        ...
