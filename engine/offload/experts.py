"""Experts that lie in host memory."""

from collections.abc import Sequence

import torch

from engine.model.activations import Activations, InputForm, Sent
from engine.model.expert_group import ExpertGroup
from engine.model.formats.interface import Experts, ExpertShape, WeightFormat
from engine.model.parameters import NamedParameters
from engine.offload.memory import SlotMemory
from engine.offload.ring import Ring
from engine.offload.room import Room, endless_room


class OffloadedLayers:
    """The layers of one model whose experts lie in host memory.

    Attributes:
        ring: brings their experts to the device.
    """

    def __init__(self, layers: Sequence[int], slots: int, device: torch.device) -> None:
        self.memory = SlotMemory(device, slots)
        self.ring = Ring(layers, slots, self.memory)

    def __contains__(self, layer: int) -> bool:
        return layer in self.ring.layers

    def experts(self, layer: int, form: WeightFormat, shape: ExpertShape, dtype: torch.dtype) -> "OffloadedExperts":
        return OffloadedExperts(layer, form, shape, dtype, self.ring, self.memory)


class OffloadedExperts:
    """`engine.model.formats.interface.Experts` of any format, whose tensors lie in a slot. They are filled there, put
    in the order in which kernels take them, and copied to host memory by `finish`. Only then are another layer's
    filled.
    """

    def __init__(
        self,
        layer: int,
        form: WeightFormat,
        shape: ExpertShape,
        dtype: torch.dtype,
        ring: Ring,
        memory: SlotMemory,
    ) -> None:
        self._layer, self._ring, self._memory = layer, ring, memory
        measured = endless_room(dtype)
        form.experts(shape, measured)
        slot = memory.slot(ring.slot_of(layer), measured.used_bytes)
        self._experts: Experts = form.experts(shape, Room(slot, dtype))
        memory.expect(layer)

    @property
    def input_form(self) -> InputForm:
        return self._experts.input_form

    def parameters(self, prefix: str) -> NamedParameters:
        yield from self._experts.parameters(prefix)

    def finish(self, group: ExpertGroup) -> None:
        self._experts.finish(group)
        self._memory.keep(self._layer, self._ring.slot_of(self._layer))

    def weights(self) -> Sequence[torch.Tensor]:
        raise AssertionError("experts in host memory do not move between ranks")

    def to_send(self, hidden: Activations) -> Sent:
        # The scales of the input are among the weights, which have to be in the slot.
        self._ring.take(self._layer)
        return self._experts.to_send(hidden)

    def forward(self, hidden: Sent, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._ring.take(self._layer)
        return self._experts.forward(hidden, choices)
