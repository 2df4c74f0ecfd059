"""Makes the uninitialised tensors and layers of one model."""

from collections.abc import Mapping, Sequence
from copy import copy
from types import MappingProxyType

import torch

from engine.balance.placement import ExpertPlacement
from engine.exchange.alone import Alone
from engine.exchange.interface import RankExchange
from engine.model.deep_ep import DeepEp
from engine.model.expert_group import ExpertGroup
from engine.model.expert_slots import ExpertSlots
from engine.model.formats.choice import Formats
from engine.model.formats.interface import Experts, ExpertShape, Linear
from engine.model.formats.plain import PlainFormat
from engine.model.quantization import LinearKind
from engine.model.side_stream import SideStream
from engine.model.tensor_group import TensorGroup
from engine.offload.experts import OffloadedLayers


class Allocator:
    """One dtype and one device. Layers get the model's formats, or are plain if these do not take their shapes.

    Attributes:
        group: the ranks that compute the same tokens, each with its share of the model; all layers have it.
        expert_group: the ranks that hold the routed experts together; all mixtures have it.
        offloaded: the layers whose experts lie in host memory, None if there are none.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        formats: Formats,
        exchange: RankExchange | None = None,
        draft_formats: Formats | None = None,
        placements: Mapping[int, ExpertPlacement] = MappingProxyType({}),
        deep_ep: DeepEp | None = None,
    ) -> None:
        """draft_formats: those of MTP modules, if they differ; exchange: with the worker's other ranks, if there are
        any; placements: of the routed experts, by layer; experts of all other layers lie in order; deep_ep: see
        `ExpertGroup`.
        """
        self.dtype = dtype
        self.device = device
        self.formats = formats
        self._draft_formats = draft_formats or formats
        exchange = exchange or Alone()
        self.group = TensorGroup(exchange)
        self.expert_group = ExpertGroup(exchange, deep_ep)
        self._placements = placements
        self.offloaded: OffloadedLayers | None = None
        # All layers share it.
        self.side_stream = SideStream(device)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def of_drafts(self) -> "Allocator":
        """The same with the formats of MTP modules."""
        other = copy(self)
        other.formats = self._draft_formats
        return other

    def with_offloaded(self, layers: Sequence[int], slots: int) -> "Allocator":
        """The same with these layers' experts in host memory, and `slots` slots for them on the device."""
        other = copy(self)
        other.offloaded = OffloadedLayers(layers, slots, self.device, self.expert_group.turns)
        return other

    def without_memory(self) -> "Allocator":
        """The same for a model that only says how large it is."""
        other = copy(self)
        other.device = torch.device("meta")
        return other

    def linear(self, kind: LinearKind, inputs: int, parts: Sequence[int]) -> Linear:
        """parts: rows of the published matrices that the layer's weight joins."""
        wanted = self.formats.linear[kind]
        form = wanted if wanted.takes(parts, inputs) else PlainFormat()
        return form.linear(parts, inputs, self)

    def joins(self, first: LinearKind, second: LinearKind, inputs: int, parts: Sequence[int]) -> bool:
        """Whether layers of both kinds can be one, whose weight joins matrices of these rows."""
        wanted, other = self.formats.linear[first], self.formats.linear[second]
        return type(wanted) is type(other) and wanted.takes(parts, inputs)

    def expert_slots(self, layer: int) -> ExpertSlots | None:
        """None if the layer's experts lie in order and stay there."""
        if layer not in self._placements:
            return None
        # Needs real memory: its tables are small, and filled at once.
        device = torch.device("cpu") if self.device.type == "meta" else self.device
        return ExpertSlots(self._placements[layer], self.expert_group.share.index, device)

    def experts(self, shape: ExpertShape, layer: int | None = None) -> Experts:
        """layer: the index of the layer that computes them, if it is one of the model's."""
        wanted = self.formats.experts
        form = wanted if wanted.takes_experts(shape) else PlainFormat()
        if layer is not None and self.offloaded is not None and layer in self.offloaded:
            return self.offloaded.experts(layer, form, shape, self.dtype)
        return form.experts(shape, self)
