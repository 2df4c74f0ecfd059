"""Makes the uninitialised tensors and layers of one model."""

from collections.abc import Mapping, Sequence
from copy import copy
from types import MappingProxyType

import torch

from engine.balance.placement import Placement
from engine.exchange.alone import Alone
from engine.exchange.interface import Exchange
from engine.model.expert_group import ExpertGroup
from engine.model.expert_slots import ExpertSlots
from engine.model.formats.choice import Formats
from engine.model.formats.interface import Experts, ExpertShape, Linear
from engine.model.formats.plain import PlainFormat
from engine.model.quantization import LinearKind
from engine.model.side_stream import SideStream
from engine.model.tensor_group import TensorGroup


class Allocator:
    """One dtype and one device. Layers get the model's formats, or are plain if these do not take their shapes.

    Attributes:
        group: the ranks that compute the same tokens, each with its share of the model; all layers have it.
        expert_group: the ranks that hold the routed experts together; all mixtures have it.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        formats: Formats,
        exchange: Exchange | None = None,
        draft_formats: Formats | None = None,
        placements: Mapping[int, Placement] = MappingProxyType({}),
    ) -> None:
        """draft_formats: of MTP modules, if others; exchange: with the worker's other ranks, if there are any;
        placements: of the routed experts, by layer; elsewhere they lie in order.
        """
        self.dtype = dtype
        self.device = device
        self.formats = formats
        self._draft_formats = draft_formats or formats
        exchange = exchange or Alone()
        self.group = TensorGroup(exchange)
        self.expert_group = ExpertGroup(exchange)
        self._placements = placements
        # All layers share it.
        self.side_stream = SideStream(device)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def of_drafts(self) -> "Allocator":
        """The same with the formats of MTP modules."""
        other = copy(self)
        other.formats = self._draft_formats
        return other

    def linear(self, kind: LinearKind, inputs: int, parts: Sequence[int]) -> Linear:
        """parts: rows of the published matrices that the layer's weight joins."""
        wanted = self.formats.linear[kind]
        form = wanted if wanted.takes(parts, inputs) else PlainFormat()
        return form.linear(parts, inputs, self)

    def expert_slots(self, layer: int) -> ExpertSlots | None:
        """None if the layer's experts lie in order and stay there."""
        if layer not in self._placements:
            return None
        return ExpertSlots(self._placements[layer], self.expert_group.share.index, self.device)

    def experts(self, shape: ExpertShape) -> Experts:
        wanted = self.formats.experts
        form = wanted if wanted.takes_experts(shape) else PlainFormat()
        return form.experts(shape, self)
