"""Rows to experts by DeepEP, in the forms in which the model sends them."""

import torch

from engine.exchange.interface import Begun, RankExchange
from engine.model.activations import Sent
from engine.model.deep_ep.elastic import ElasticBuffer, Rows, Traffic, compiles
from engine.parallel.layout import Group, Layout
from kernels.act_quant import GROUP, Quantized
from kernels.act_quant.quantized import aligned_rows
from kernels.moe_gate import NO_EXPERT
from kernels.vendor import find_package
from kernels.w4a8_gemm import ScaledRows


def usable(layout: Layout, traffic: Traffic, device: torch.device) -> bool:
    """Whether such ranks could use the package if they have it. The same on all ranks."""
    between_hosts, whole_experts = layout.hosts > 1, layout.ep == layout.world
    return device.type == "cuda" and between_hosts and whole_experts and compiles(layout, traffic)


def find_deep_ep(
    exchange: RankExchange, traffic: Traffic, device: torch.device, *, wanted: bool = True
) -> "DeepEp | None":
    """None if not all ranks can use it and have it `wanted`. Called by all of them at once."""
    layout = exchange.place.layout
    if not usable(layout, traffic, device):
        return None
    module = find_package("deep_ep", ["ElasticBuffer", "topk_idx_t"]) if wanted else None
    # All ranks ask, those without the package too.
    everywhere = exchange.all_gather(torch.tensor([module is not None]), Group.WORLD)
    if module is None or not bool(everywhere.all()):
        return None
    first = exchange.place.rank * (traffic.experts // layout.world)
    return DeepEp(ElasticBuffer(module, exchange, traffic), module.topk_idx_t, first)


class DeepEp:
    """One rank's end. Every rank makes the same calls in the same order, with equally many rows."""

    def __init__(self, buffer: ElasticBuffer, index_dtype: torch.dtype, first: int) -> None:
        """index_dtype: of choices, as the package takes them; first: the number of this rank's first expert."""
        self._buffer = buffer
        self._index_dtype = index_dtype
        self._first = first

    def takes(self, rows: Sent) -> bool:
        """Whether it can carry rows of this form now."""
        if isinstance(rows, torch.Tensor) and rows.dtype != torch.bfloat16:
            return False
        values = rows if isinstance(rows, torch.Tensor) else rows.values
        return not (_is_captured(values) and self._buffer.waits(len(values)))

    def begin_dispatch(
        self, rows: Sent, weights: torch.Tensor, choices: torch.Tensor
    ) -> Begun[tuple[Sent, torch.Tensor, torch.Tensor, object]]:
        """The rows of all ranks for which one of this rank's experts was chosen, with weights and choices of each, and
        the way back for `begin_combine`. After them there may be rows that no rank sent, without experts.

        rows: [tokens, hidden] that it `takes`; weights: [tokens, k] float32; choices: [tokens, k] int64, of all
        experts. A choice of another rank's expert becomes NO_EXPERT.
        """
        asked = choices.to(self._index_dtype).contiguous()
        begun = self._buffer.begin_dispatch(_packed(rows), weights.contiguous(), asked)

        def collect() -> tuple[Sent, torch.Tensor, torch.Tensor, object]:
            received = begun.finish()
            local = received.choices.long()
            numbers = (local + self._first).where(local >= 0, NO_EXPERT)
            return _unpacked(received.rows, rows), received.weights, numbers, received.way_back

        return Begun(collect)

    def begin_combine(self, parts: torch.Tensor, way_back: object) -> Begun[torch.Tensor]:
        """The sums of what all ranks make of this rank's rows. parts: [received rows, hidden] bfloat16."""
        return self._buffer.begin_combine(parts.contiguous(), way_back)


def _is_captured(rows: torch.Tensor) -> bool:
    return rows.is_cuda and torch.cuda.is_current_stream_capturing()


def _packed(rows: Sent) -> Rows:
    """The rows as the package takes them."""
    return rows if isinstance(rows, torch.Tensor) else (rows.values, _scales_of_groups(rows))


def _unpacked(received: Rows, rows: Sent) -> Sent:
    """The received rows, in the form of the `rows` that were sent."""
    if isinstance(received, torch.Tensor):
        return received
    values, scales = received
    if isinstance(rows, ScaledRows):
        return ScaledRows(values, rows.scales if rows.static else scales[:, 0].contiguous(), rows.static)
    return _quantized(values, scales)


def _scales_of_groups(rows: Quantized | ScaledRows) -> torch.Tensor:
    """A scale for each group. Rows that have fewer scales repeat them, which takes 3% more bytes."""
    if isinstance(rows, Quantized):
        return rows.scales.contiguous()
    tokens, width = rows.values.shape
    # All ranks have the static scale, so ones are sent in its place.
    scales = rows.scales.new_ones(tokens) if rows.static else rows.scales
    return scales.unsqueeze(1).repeat(1, width // GROUP)


def _quantized(values: torch.Tensor, scales: torch.Tensor) -> Quantized:
    """scales: [rows, groups]."""
    rows, groups = scales.shape
    columns = scales.new_empty(groups, aligned_rows(rows))[:, :rows].t()
    return Quantized(values, columns.copy_(scales))
