"""The package's second version: `ElasticBuffer` (deep_ep/buffers/elastic.py), over NCCL's device communicators.

It compiles its kernels with nvcc when they are first called, some seconds for each number of rows that it makes room
for, and keeps them in ~/.deep_ep.

A step with few rows of each rank may be captured. It has room for all rows of all ranks, as many as an all-gather
brings, and the host does not wait to learn how many came.
"""

from typing import Any, ClassVar

import torch

from engine.exchange.interface import Exchange
from engine.model.deep_ep.interface import Received, Rows, Traffic
from engine.parallel.layout import Group, Layout
from kernels.tile_sizes import next_power_of_2

# What its kernels between hosts are written for: static assertions of deep_ep/include/deep_ep/impls/hybrid_*.cuh.
MOST_HOSTS = 32
MOST_RANKS_A_HOST = 64
MOST_RANKS_AND_EXPERTS = 128
HIDDEN_MULTIPLE = 256
# The number that the package takes itself where nothing is computed beside it. Its own estimate would ask nvidia-smi
# and ibstat, and is not made for models whose choices are limited to groups of experts.
MULTIPROCESSORS = 64
# Up to this many rows of a rank the host does not wait. Decode steps have fewer, prompts more.
MOST_WITHOUT_WAITING = 256
# It makes room for this many rows of a rank, or for a larger power of two.
LEAST_ROOM = 16


class ElasticBuffer:
    """An `engine.model.deep_ep.interface.Buffer`."""

    NAME: ClassVar[str] = "ElasticBuffer"

    @staticmethod
    def fits(layout: Layout, traffic: Traffic) -> bool:
        """Whether its kernels compile for these."""
        return (
            layout.hosts <= MOST_HOSTS
            and layout.ranks_a_host <= MOST_RANKS_A_HOST
            and layout.ranks_a_host + traffic.experts // layout.world <= MOST_RANKS_AND_EXPERTS
            and traffic.hidden % HIDDEN_MULTIPLE == 0
        )

    def __init__(self, module: Any, exchange: Exchange, traffic: Traffic) -> None:
        """module: deep_ep."""
        self._traffic = traffic
        # Its memory ends with the process: destroying it would wait for ranks that may have ended already.
        self._buffer = module.ElasticBuffer(
            _ProcessGroup(module, exchange),
            num_max_tokens_per_rank=traffic.tokens,
            hidden=traffic.hidden,
            num_topk=traffic.choices,
            prefer_overlap_with_compute=False,
            explicitly_destroy=True,
        )

    def waits(self, tokens: int) -> bool:
        return tokens > MOST_WITHOUT_WAITING

    def dispatch(self, rows: Rows, weights: torch.Tensor, choices: torch.Tensor) -> Received:
        waits = self.waits(len(choices))
        received, local, received_weights, way_back, _ = self._buffer.dispatch(
            rows,
            topk_idx=choices,
            topk_weights=weights,
            num_experts=self._traffic.experts,
            num_max_tokens_per_rank=self._room(len(choices)),
            num_sms=MULTIPROCESSORS,
            do_cpu_sync=waits,
        )
        if not waits:
            # Nothing is written behind the rows that came.
            came = way_back.psum_num_recv_tokens_per_scaleup_rank[-1]
            local = local.where(torch.arange(len(local), device=local.device).unsqueeze(1) < came, -1)
        return Received(received, received_weights, local, way_back)

    def combine(self, parts: torch.Tensor, way_back: object) -> torch.Tensor:
        sums: torch.Tensor
        sums, _, _ = self._buffer.combine(parts, way_back)
        return sums

    def _room(self, tokens: int) -> int:
        """For how many rows of each rank there is room. It is the same on all ranks."""
        assert tokens <= self._traffic.tokens
        return min(max(next_power_of_2(tokens), LEAST_ROOM), self._traffic.tokens)


class _ProcessGroup:
    """Stands in for torch.distributed's process group and its backend: what ElasticBuffer asks of them. Our ranks have
    no process group over all hosts.
    """

    def __init__(self, module: Any, exchange: Exchange) -> None:
        self._exchange = exchange
        own = torch.frombuffer(bytearray(module._C.get_local_nccl_unique_id()), dtype=torch.uint8)
        first = bytearray(exchange.broadcast(own, Group.WORLD, 0).numpy().tobytes())
        self._communicator: int = module._C.create_nccl_comm(first, self.size(), self.rank())

    def rank(self) -> int:
        return self._exchange.place.rank

    def size(self) -> int:
        return self._exchange.place.layout.world

    def barrier(self) -> None:
        self._exchange.barrier(Group.WORLD)

    def _get_backend(self, device: torch.device) -> "_ProcessGroup":
        return self

    def _comm_ptr(self) -> int:
        """The package takes this communicator of NCCL, and does not make one over pickled tensors."""
        return self._communicator
