"""DeepEP's `ElasticBuffer` (deep_ep/buffers/elastic.py), its second version, over NCCL's device communicators.

It compiles its kernels with nvcc when they are first called, some seconds for each number of rows that it makes room
for, and keeps them in ~/.deep_ep.

Its kernels run on a stream of its own, one exchange after another, while the rank computes. A step with few rows of
each rank may be captured. It has room for all rows of all ranks, as many as an all-gather
brings, and the host does not wait to learn how many came.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from engine.exchange.interface import Begun, RankExchange
from engine.parallel.layout import Group, Layout
from kernels.tile_sizes import next_power_of_2

# What its kernels between hosts are written for: static assertions of deep_ep/include/deep_ep/impls/hybrid_*.cuh.
MOST_HOSTS = 32
MOST_RANKS_A_HOST = 64
MOST_RANKS_AND_EXPERTS = 128
HIDDEN_MULTIPLE = 256
# DeepEP's own default when it may use all multiprocessors. Its estimate would ask nvidia-smi and ibstat, and is not
# made for models whose choices are limited to groups of experts.
MULTIPROCESSORS = 64
# Up to this many rows of a rank the host does not wait. Decode steps have fewer, prompts more.
MOST_WITHOUT_WAITING = 256
# It makes room for this many rows of a rank, or for a larger power of two.
LEAST_ROOM = 16


# In bfloat16, or in float8 with float32 scales, [rows, width / 128].
Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a model's mixtures of experts send. The same on all ranks."""

    # Width of a row.
    hidden: int
    # How many experts all ranks have, with copies; each has equally many.
    experts: int
    # How many of them a row goes to.
    choices: int
    # The most rows of each rank at once.
    tokens: int


class Received(NamedTuple):
    """The rows of all ranks for which one of this rank's experts was chosen; perhaps others after them."""

    rows: Rows
    # [rows, k] float32.
    weights: torch.Tensor
    # [rows, k], counted from this rank's first expert; -1 for other ranks' experts, and in other rows.
    choices: torch.Tensor
    # What `combine` needs.
    way_back: object


def compiles(layout: Layout, traffic: Traffic) -> bool:
    """Whether the package's kernels compile for these."""
    return (
        layout.hosts <= MOST_HOSTS
        and layout.ranks_a_host <= MOST_RANKS_A_HOST
        and layout.ranks_a_host + traffic.experts // layout.world <= MOST_RANKS_AND_EXPERTS
        and traffic.hidden % HIDDEN_MULTIPLE == 0
    )


class ElasticBuffer:
    """One rank's end. Every rank makes the same calls in the same order, with equally many rows."""

    def __init__(self, module: Any, exchange: RankExchange, traffic: Traffic) -> None:
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
        """Whether the host waits for the device when this rank dispatches this many rows: they cannot be captured."""
        return tokens > MOST_WITHOUT_WAITING

    def begin_dispatch(self, rows: Rows, weights: torch.Tensor, choices: torch.Tensor) -> Begun[Received]:
        """weights: [tokens, k] float32; choices: [tokens, k] of the package's dtype, -1 for none; both contiguous."""
        waits = self.waits(len(choices))
        received, local, received_weights, way_back, event = self._buffer.dispatch(
            rows,
            topk_idx=choices,
            topk_weights=weights,
            num_experts=self._traffic.experts,
            num_max_tokens_per_rank=self._room(len(choices)),
            num_sms=MULTIPROCESSORS,
            do_cpu_sync=waits,
            async_with_compute_stream=True,
        )

        def collect() -> Received:
            event.current_stream_wait()
            own = local
            if not waits:
                # The package writes nothing past the rows that came.
                came = way_back.psum_num_recv_tokens_per_scaleup_rank[-1]
                own = local.where(torch.arange(len(local), device=local.device).unsqueeze(1) < came, -1)
            return Received(received, received_weights, own, way_back)

        return Begun(collect, (rows, weights, choices))

    def begin_combine(self, parts: torch.Tensor, way_back: object) -> Begun[torch.Tensor]:
        """The sums of what ranks make of this rank's rows. parts: [received rows, hidden] bfloat16, contiguous."""
        sums, _, event = self._buffer.combine(parts, way_back, async_with_compute_stream=True)

        def collect() -> torch.Tensor:
            event.current_stream_wait()
            found: torch.Tensor = sums
            return found

        return Begun(collect, (parts, way_back))

    def _room(self, tokens: int) -> int:
        """For how many rows of each rank there is room. It is the same on all ranks."""
        assert tokens <= self._traffic.tokens
        return min(max(next_power_of_2(tokens), LEAST_ROOM), self._traffic.tokens)


class _ProcessGroup:
    """Stands in for torch.distributed's process group and its backend: what ElasticBuffer asks of them. Our ranks have
    no process group over all hosts.
    """

    def __init__(self, module: Any, exchange: RankExchange) -> None:
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
