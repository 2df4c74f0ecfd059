"""Rows to the experts of other hosts, and sums back, by DeepEP: one copy of a row a host, then NVLink.

UNPROVEN: written by the source of github.com/deepseek-ai/DeepEP at dd758ca (deep_ep/buffers/legacy.py), and tested
against a stand-in that computes what that documents. No build of it has run here. `Buffer` is V1's, in its
high-throughput form: the host learns how many rows come, and so no captured step can use it.
"""

from typing import Any

import msgspec
import torch
from torch.nn import functional

from engine.exchange.interface import Exchange
from engine.model.activations import Sent
from engine.parallel.layout import Group, Place
from kernels.act_quant import GROUP, Quantized
from kernels.act_quant.quantized import aligned_rows
from kernels.vendor import find_package
from kernels.w4a8_gemm import ScaledRows

# What its kernels between hosts are written for: so many GPUs on each, and these numbers of ranks.
RANKS_A_HOST = 8
WORLDS = (16, 24, 32, 48, 64, 96, 128, 144, 160)


def usable(place: Place, device: torch.device) -> bool:
    """Whether ranks like this could use it, if it is there. The same on all of them."""
    layout = place.layout
    whole = layout.ep == layout.world
    return device.type == "cuda" and layout.ranks_a_host == RANKS_A_HOST and layout.world in WORLDS and whole


def find_deep_ep(exchange: Exchange, hidden: int, experts: int, device: torch.device) -> "DeepEp | None":
    """None if not all ranks can use it. Called by all of them at once. experts: how many all have, with copies."""
    if not usable(exchange.place, device):
        return None
    module = find_package("deep_ep", ["Buffer", "topk_idx_t"])
    there = torch.tensor([module is not None])
    if not bool(exchange.all_gather(there, Group.WORLD).all()):
        return None
    return DeepEp(module, exchange, hidden, experts)


class DeepEp:
    """One rank's end. Every rank makes the same calls in the same order."""

    def __init__(self, module: Any, exchange: Exchange, hidden: int, experts: int) -> None:
        """module: deep_ep; hidden: width of a row; experts: how many all ranks have, equally many each."""
        place = exchange.place
        ranks = place.layout.world
        self._index_dtype: torch.dtype = module.topk_idx_t
        self._experts, self._own = experts, experts // ranks
        self._first = place.rank * self._own
        configs = [module.Buffer.get_dispatch_config(ranks), module.Buffer.get_combine_config(ranks)]
        row_bytes = hidden * torch.bfloat16.itemsize
        self._buffer = module.Buffer(
            None,
            max(config.get_nvl_buffer_size_hint(row_bytes, ranks) for config in configs),
            max(config.get_rdma_buffer_size_hint(row_bytes, ranks) for config in configs),
            comm=_Communicator(exchange),
        )

    def takes(self, rows: Sent) -> bool:
        """Whether it can carry rows of this form now."""
        if isinstance(rows, torch.Tensor):
            return rows.dtype == torch.bfloat16 and not _is_captured(rows)
        return not _is_captured(rows.values)

    def dispatch(
        self, rows: Sent, weights: torch.Tensor, choices: torch.Tensor
    ) -> tuple[Sent, torch.Tensor, torch.Tensor, object]:
        """The rows, of all ranks, of which one of this rank's experts was chosen, with weights and choices of each, and
        the way back for `combine`. rows: [tokens, hidden] that it `takes`; weights: [tokens, k] float32; choices:
        [tokens, k] int64, of all experts. A choice of another rank's expert becomes that of any of these.
        """
        asked = choices.to(self._index_dtype).contiguous()
        to_rank, to_host, to_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(asked, self._experts)
        sent = rows if isinstance(rows, torch.Tensor) else (rows.values, _scales_of_groups(rows))
        received, local, received_weights, _, way_back, _ = self._buffer.dispatch(
            sent,
            num_tokens_per_rank=to_rank,
            num_tokens_per_rdma_rank=to_host,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=to_expert,
            topk_idx=asked,
            topk_weights=weights.contiguous(),
        )
        return _like(rows, received), received_weights, self._numbers(local.long()), way_back

    def combine(self, parts: torch.Tensor, way_back: object) -> torch.Tensor:
        """The sums of what ranks make of this one's rows. parts: [received rows, hidden] bfloat16."""
        sums: torch.Tensor
        sums, _, _ = self._buffer.combine(parts.contiguous(), way_back)
        return sums

    def _numbers(self, local: torch.Tensor) -> torch.Tensor:
        """The numbers among all experts of choices that are counted from this rank's first, -1 for others'. In a row
        they stay distinct.
        """
        elsewhere = local < 0
        others = (self._first + self._own + elsewhere.cumsum(1) - 1) % self._experts
        return torch.where(elsewhere, others, local + self._first)


class _Communicator:
    """What Buffer asks of mpi4py's: where ranks learn each other's handles when it is made."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def Get_rank(self) -> int:
        return self._exchange.place.rank

    def Get_size(self) -> int:
        return self._exchange.place.layout.world

    def allgather(self, value: int | bytearray | None) -> list[int | bytearray | None]:
        """Not pickled, as torch.distributed would: who can write to another rank must not run code there."""
        own = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
        lengths = self._exchange.all_gather(torch.tensor([len(own)]), Group.WORLD).tolist()
        padded = functional.pad(own, (0, max(lengths) - len(own)))
        gathered = self._exchange.all_gather(padded[None], Group.WORLD)
        return [
            msgspec.msgpack.decode(row[:length].numpy().tobytes(), type=int | bytearray | None)
            for row, length in zip(gathered, lengths, strict=True)
        ]


def _is_captured(rows: torch.Tensor) -> bool:
    return rows.is_cuda and torch.cuda.is_current_stream_capturing()


def _scales_of_groups(rows: Quantized | ScaledRows) -> torch.Tensor:
    """As the package takes them: [rows, width / 128]. What has fewer scales repeats them, 3% more bytes a row."""
    if isinstance(rows, Quantized):
        return rows.scales.contiguous()
    tokens, width = rows.values.shape
    # All ranks have a static scale.
    scales = rows.scales.new_ones(tokens) if rows.static else rows.scales
    return scales.unsqueeze(1).repeat(1, width // GROUP)


def _like(rows: Sent, received: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Sent:
    """What was received of rows that were sent in this form."""
    if isinstance(received, torch.Tensor):
        return received
    values, scales = received
    if isinstance(rows, ScaledRows):
        return ScaledRows(values, rows.scales if rows.static else scales[:, 0].contiguous(), rows.static)
    return _quantized(values, scales)


def _quantized(values: torch.Tensor, scales: torch.Tensor) -> Quantized:
    """scales: [rows, groups]."""
    rows, groups = scales.shape
    columns = scales.new_empty(groups, aligned_rows(rows))[:, :rows].t()
    return Quantized(values, columns.copy_(scales))
