"""A rail: ranks with the same number on their hosts, one on each host. torch.distributed carries their tensors."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

# torch.distributed takes these names from here too.
from torch._C._distributed_c10d import PrefixStore, Store

from engine.exchange.group_watch import GroupWatch
from engine.exchange.interface import Begun
from engine.exchange.reach import check_reach, gloo_address
from engine.parallel.meeting import LIMIT_SECONDS, LOOK_SECONDS
from mesh.errors import RankLost

# How often a rank that waits for gloo asks whether the others are still there.
LOOK = timedelta(seconds=LOOK_SECONDS)
GROUP_BROKEN = "the group of the worker's ranks has been broken up"


class Rail:
    """One rank's end. All make the same calls in the same order, with tensors of one shape and dtype.

    gloo carries what lies on a CPU, NCCL what lies on a GPU. With gloo every call raises RankLost if another rank has
    ended, or once the group is broken. With NCCL the device waits, and not the host; once the group is broken its
    kernels end, and calls and `check` raise RankLost.

    Keep a rail that has lost a rank for its limit of seconds: if a host was cut off, its last call takes that long, and
    the destructor waits for the call.
    """

    def __init__(
        self,
        store: Store,
        own: int,
        ranks: int,
        device: torch.device,
        limit_seconds: float = LIMIT_SECONDS,
        broken: Callable[[], bool] = lambda: False,
        give_up: Callable[[], None] = lambda: None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Called by all at once. store: where they find each other; own: this rank's number among them; broken: whether
        the worker's ranks cannot go on together, asked while this rank waits; give_up: tells this host's ranks that
        this one's device waits no more; given_up: whether one of them has.

        The network device is GLOO_SOCKET_IFNAME's and NCCL_SOCKET_IFNAME's. Raises RankLost, or EngineFailed if it is
        this rank's host that the others do not reach.
        """
        self.own, self.ranks = own, ranks
        self._limit = timedelta(seconds=limit_seconds)
        self._broken = broken
        check_reach(_part("reach", store), own, ranks, gloo_address())
        try:
            # Sizes and other values that only the host needs lie on the CPU in any case.
            self._of_host = distributed.ProcessGroupGloo(_part("gloo", store), own, ranks, self._limit)
            self._of_device = self._of_host if device.type == "cpu" else self._nccl(store, device)
        except RuntimeError as error:
            raise _lost(error) from error
        self._given_up = given_up
        self._watch: GroupWatch | None = None
        if self._of_device is not self._of_host:
            self._watch = GroupWatch(give_up, self._of_device.abort, broken)

    def check(self) -> None:
        """Raises RankLost if what the device got may be wrong, since a rank was lost."""
        if self._given_up():
            raise RankLost(GROUP_BROKEN)

    def leave(self) -> None:
        """Have the device wait for no other rank any more. `broken` is not asked after this."""
        if self._watch is not None:
            self._watch.give_up()

    def begin_gather(self, part: torch.Tensor) -> Begun[torch.Tensor]:
        """The parts of all: [...] becomes [ranks, ...], bit by bit."""
        gathered = part.new_empty(self.ranks, *part.shape)
        begun = self.begin_gathers([gathered], [part])

        def collect() -> torch.Tensor:
            begun.finish()
            return gathered

        return Begun(collect)

    def begin_gathers(self, gathered: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> Begun[None]:
        """`begin_gather` of several tensors, with NCCL as one call. gathered: [ranks, ...] of each, contiguous."""
        given = [part.contiguous() for part in parts]
        wanted = [(result, part) for result, part in zip(gathered, given, strict=True) if part.numel()]
        if not wanted or not wanted[0][0].is_cuda:
            begun = [self._begin("_allgather_base", result, _bytes(part)) for result, part in wanted]
            return Begun(lambda: [each.finish() for each in begun].clear(), given)
        group: Any = self._of_device
        try:
            group._start_coalescing()
            for result, part in wanted:
                group._allgather_base(_bytes(result), _bytes(part))
            work = group._end_coalescing()
        except RuntimeError as error:
            raise _lost(error) from error
        return Begun(lambda: self._finish(group, work), given)

    def begin_swap(self, parts: torch.Tensor) -> Begun[torch.Tensor]:
        """Each gets the part that every rank has for it: [ranks, ...], by receiver, becomes [ranks, ...], by sender."""
        given = parts.contiguous()
        if not given.numel():
            return Begun(lambda: given)
        return self._begin("alltoall_base", torch.empty_like(given), _bytes(given), [], [])

    def copy_between(self, values: torch.Tensor, sources: Sequence[int]) -> torch.Tensor:
        """The values of this rank's source, or an empty tensor if that is this rank itself. Nothing else travels.

        sources: by the rail's rank, the number of its source.
        """
        if not values.numel():
            return values
        own, others = _bytes(values.contiguous()), range(self.ranks)
        received = [len(own) * (other == sources[self.own] and other != self.own) for other in others]
        sent = [len(own) * (sources[other] == self.own and other != self.own) for other in others]
        result = (
            torch.empty_like(values, memory_format=torch.contiguous_format) if any(received) else values.new_empty(0)
        )
        # A copy for each receiver.
        given = own.repeat(sum(size > 0 for size in sent))
        return self._begin("alltoall_base", result, given, received, sent).finish()

    def broadcast(self, values: torch.Tensor, source: int) -> torch.Tensor:
        """The values of one of the rail's ranks; source: its number among them, which is its host's."""
        sent = values.clone(memory_format=torch.contiguous_format)
        if not sent.numel():
            return sent
        return self._begin("broadcast", sent, source).finish()

    def _nccl(self, store: Store, device: torch.device) -> Any:
        # Its own threads would ask the store, which answers only while ranks load.
        for name in ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
            os.environ.setdefault(name, "0")
        # By default they end the process when a rank was lost.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = self._limit
        group = distributed.ProcessGroupNCCL(_part("nccl", store), self.own, self.ranks, options)
        # Connected now, and not at the first call, which may be captured. Tensors have a device with an index, and each
        # device a connection of its own.
        index = torch.cuda.current_device() if device.index is None else device.index
        group.eager_connect_single_device(torch.device("cuda", index))
        return group

    def _begin(self, name: str, result: torch.Tensor, *given: Any) -> Begun[torch.Tensor]:
        group = self._of_device if result.is_cuda else self._of_host
        try:
            work = getattr(group, name)(_bytes(result), *given)
        except RuntimeError as error:
            raise _lost(error) from error

        def collect() -> torch.Tensor:
            self._finish(group, work)
            return result

        return Begun(collect, given)

    def _finish(self, group: Any, work: Any) -> None:
        if group is self._of_host:
            self._look_after(work)
        try:
            work.wait()
        except RuntimeError as error:
            raise _lost(error) from error

    def _look_after(self, work: Any) -> None:
        """Return once the call has ended, however it did. gloo notices a host that was cut off only at its limit."""
        while not work.is_completed():
            # Raised if the time is over, and by a call that fails, which the caller hears of by itself.
            with suppress(RuntimeError):
                work.wait(LOOK)
            if not work.is_completed() and self._broken():
                raise RankLost(GROUP_BROKEN)


def _part(name: str, store: Store) -> PrefixStore:
    return PrefixStore(name, store)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: not every dtype can be sent as such, and nothing is added on the way."""
    return values.view(-1).view(torch.uint8)


def _lost(error: RuntimeError) -> RankLost:
    return RankLost(f"a rank of another host has ended, or cannot be reached: {str(error).splitlines()[0]}")
