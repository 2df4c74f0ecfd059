"""Ranks with the same number on their hosts, one a host, and how tensors go between them: over torch.distributed."""

from datetime import timedelta
from typing import Any

import torch
from torch import distributed

# Where torch.distributed, which names them too, has them from.
from torch._C._distributed_c10d import PrefixStore, Store

from engine.parallel.meeting import LIMIT_SECONDS
from mesh.errors import RankLost


class Rail:
    """One rank's end. All make the same calls in the same order, with tensors of one shape and dtype.

    gloo carries what lies on a CPU, NCCL what lies on a GPU. Every call raises RankLost if another rank has ended; with
    NCCL, as torch is set up by default, this process ends then.
    """

    def __init__(
        self,
        store: Store,
        own: int,
        ranks: int,
        device: torch.device,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        """Called by all at once. store: where they find each other; own: this rank's number among them.

        The network device is GLOO_SOCKET_IFNAME's and NCCL_SOCKET_IFNAME's. Raises RankLost.
        """
        self.own, self.ranks = own, ranks
        self._limit = timedelta(seconds=limit_seconds)
        try:
            # Sizes and other things that only hosts need lie on the CPU in any case.
            self._of_host = distributed.ProcessGroupGloo(_part("gloo", store), own, ranks, self._limit)
            self._of_device = self._of_host if device.type == "cpu" else self._nccl(store, device)
        except RuntimeError as error:
            raise _lost(error) from error

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The parts of all: [...] becomes [ranks, ...], bit by bit."""
        given = part.contiguous()
        gathered = given.new_empty(self.ranks, *given.shape)
        if given.numel():
            self._run("_allgather_base", _bytes(gathered), _bytes(given))
        return gathered

    def swap(self, parts: torch.Tensor) -> torch.Tensor:
        """Each gets the part that every rank has for it: [ranks, ...], by receiver, becomes [ranks, ...], by sender."""
        given = parts.contiguous()
        swapped = torch.empty_like(given)
        if given.numel():
            self._run("alltoall_base", _bytes(swapped), _bytes(given), [], [])
        return swapped

    def broadcast(self, values: torch.Tensor, source: int) -> torch.Tensor:
        """Those of one of them."""
        sent = values.clone(memory_format=torch.contiguous_format)
        if sent.numel():
            self._run("broadcast", _bytes(sent), source)
        return sent

    def _nccl(self, store: Store, device: torch.device) -> Any:
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = self._limit
        group = distributed.ProcessGroupNCCL(_part("nccl", store), self.own, self.ranks, options)
        # Not at the first call, which may be captured.
        group.eager_connect_single_device(device)
        return group

    def _run(self, name: str, result: torch.Tensor, *given: Any) -> None:
        """On a GPU its current stream waits, not the host."""
        group = self._of_device if result.is_cuda else self._of_host
        try:
            getattr(group, name)(result, *given).wait()
        except RuntimeError as error:
            raise _lost(error) from error


def _part(name: str, store: Store) -> PrefixStore:
    return PrefixStore(name, store)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """The same memory. Not every dtype can be sent as such, and nobody adds on the way."""
    return values.view(-1).view(torch.uint8)


def _lost(error: RuntimeError) -> RankLost:
    return RankLost(f"a rank of another host has ended, or cannot be reached: {str(error).splitlines()[0]}")
