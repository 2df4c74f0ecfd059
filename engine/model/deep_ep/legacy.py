"""The package's first version: `Buffer` in its high-throughput form (deep_ep/buffers/legacy.py).

The host learns how many rows come, and so no captured step can use it.
"""

from typing import Any, ClassVar

import msgspec
import torch
from torch.nn import functional

from engine.exchange.interface import Exchange
from engine.model.deep_ep.interface import Received, Rows, Traffic
from engine.parallel.layout import Group, Layout

# What its kernels between hosts are written for: this many GPUs on each host, and these numbers of ranks.
RANKS_A_HOST = 8
WORLDS = (16, 24, 32, 48, 64, 96, 128, 144, 160)


class LegacyBuffer:
    """An `engine.model.deep_ep.interface.Buffer`."""

    NAME: ClassVar[str] = "Buffer"

    @staticmethod
    def fits(layout: Layout, traffic: Traffic) -> bool:
        return layout.ranks_a_host == RANKS_A_HOST and layout.world in WORLDS

    def __init__(self, module: Any, exchange: Exchange, traffic: Traffic) -> None:
        """module: deep_ep."""
        ranks = exchange.place.layout.world
        self._experts = traffic.experts
        configs = [module.Buffer.get_dispatch_config(ranks), module.Buffer.get_combine_config(ranks)]
        row_bytes = traffic.hidden * torch.bfloat16.itemsize
        self._buffer = module.Buffer(
            None,
            max(config.get_nvl_buffer_size_hint(row_bytes, ranks) for config in configs),
            max(config.get_rdma_buffer_size_hint(row_bytes, ranks) for config in configs),
            comm=_Communicator(exchange),
        )

    def waits(self, tokens: int) -> bool:
        return True

    def dispatch(self, rows: Rows, weights: torch.Tensor, choices: torch.Tensor) -> Received:
        to_rank, to_host, to_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(choices, self._experts)
        received, local, received_weights, _, way_back, _ = self._buffer.dispatch(
            rows,
            num_tokens_per_rank=to_rank,
            num_tokens_per_rdma_rank=to_host,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=to_expert,
            topk_idx=choices,
            topk_weights=weights,
        )
        return Received(received, received_weights, local, way_back)

    def combine(self, parts: torch.Tensor, way_back: object) -> torch.Tensor:
        sums: torch.Tensor
        sums, _, _ = self._buffer.combine(parts, way_back)
        return sums


class _Communicator:
    """Stands in for mpi4py's communicator, over which ranks learn each other's handles when Buffer is made."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def Get_rank(self) -> int:
        return self._exchange.place.rank

    def Get_size(self) -> int:
        return self._exchange.place.layout.world

    def allgather(self, value: int | bytearray | None) -> list[int | bytearray | None]:
        """Does not pickle, as torch.distributed would: whoever can write to another rank must not run code there."""
        own = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
        lengths = self._exchange.all_gather(torch.tensor([len(own)]), Group.WORLD).tolist()
        padded = functional.pad(own, (0, max(lengths) - len(own)))
        gathered = self._exchange.all_gather(padded[None], Group.WORLD)
        return [
            msgspec.msgpack.decode(row[:length].numpy().tobytes(), type=int | bytearray | None)
            for row, length in zip(gathered, lengths, strict=True)
        ]
