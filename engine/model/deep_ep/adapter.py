"""One interface to the package, whichever version of its buffer it has."""

import torch

from engine.exchange.interface import Exchange
from engine.model.activations import Sent
from engine.model.deep_ep.elastic import ElasticBuffer
from engine.model.deep_ep.forms import packed, unpacked
from engine.model.deep_ep.interface import Buffer, Traffic
from engine.model.deep_ep.legacy import LegacyBuffer
from engine.parallel.layout import Group, Layout
from kernels.moe_gate import NO_EXPERT
from kernels.vendor import find_package

Kind = type[ElasticBuffer] | type[LegacyBuffer]


def usable(layout: Layout, traffic: Traffic, device: torch.device) -> list[Kind]:
    """The buffers that such ranks could use, if the package has them, the better first. The same on all ranks."""
    whole = layout.ep == layout.world
    if device.type != "cuda" or layout.hosts == 1 or not whole:
        return []
    # The package's authors measured the first of these at up to 1.3 times the speed of the other, which they call
    # legacy.
    kinds: tuple[Kind, ...] = (ElasticBuffer, LegacyBuffer)
    return [kind for kind in kinds if kind.fits(layout, traffic)]


def find_deep_ep(exchange: Exchange, traffic: Traffic, device: torch.device) -> "DeepEp | None":
    """None if not all ranks can use it. Called by all of them at once."""
    kinds = usable(exchange.place.layout, traffic, device)
    module = find_package("deep_ep", ["Buffer", "topk_idx_t"]) if kinds else None
    for kind in kinds:
        there = torch.tensor([hasattr(module, kind.NAME)])
        # All ranks ask, those without the package too.
        if bool(exchange.all_gather(there, Group.WORLD).all()):
            assert module is not None
            first = exchange.place.rank * (traffic.experts // exchange.place.layout.world)
            return DeepEp(kind(module, exchange, traffic), module.topk_idx_t, first)
    return None


class DeepEp:
    """One rank's end. Every rank makes the same calls in the same order, with equally many rows."""

    def __init__(self, buffer: Buffer, index_dtype: torch.dtype, first: int) -> None:
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

    def dispatch(
        self, rows: Sent, weights: torch.Tensor, choices: torch.Tensor
    ) -> tuple[Sent, torch.Tensor, torch.Tensor, object]:
        """The rows of all ranks for which one of this rank's experts was chosen, with weights and choices of each, and
        the way back for `combine`. Behind them there may be rows that nobody sent, without experts.

        rows: [tokens, hidden] that it `takes`; weights: [tokens, k] float32; choices: [tokens, k] int64, of all
        experts. A choice of another rank's expert becomes NO_EXPERT.
        """
        asked = choices.to(self._index_dtype).contiguous()
        received = self._buffer.dispatch(packed(rows), weights.contiguous(), asked)
        local = received.choices.long()
        numbers = (local + self._first).where(local >= 0, NO_EXPERT)
        return unpacked(received.rows, rows), received.weights, numbers, received.way_back

    def combine(self, parts: torch.Tensor, way_back: object) -> torch.Tensor:
        """The sums of what all ranks make of this rank's rows. parts: [received rows, hidden] bfloat16."""
        return self._buffer.combine(parts.contiguous(), way_back)


def _is_captured(rows: torch.Tensor) -> bool:
    return rows.is_cuda and torch.cuda.is_current_stream_capturing()
