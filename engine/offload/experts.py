"""Experts that lie in host memory."""

from collections import Counter
from collections.abc import Sequence

import torch

from engine.exchange.turns import StepTurns
from engine.model.activations import Activations, InputForm, Sent
from engine.model.expert_group import ExpertGroup
from engine.model.formats.interface import Experts, ExpertShape, WeightFormat
from engine.model.parameters import NamedParameters
from engine.offload.memory import Room, SlotMemory, endless_room
from engine.offload.ring import Ring


class OffloadedLayers:
    """The layers of one model whose experts lie in host memory. Each part of a step calls `begin`, `passed` after each
    layer, and `end`.

    Attributes:
        ring: brings their experts to the device.
    """

    def __init__(self, layers: Sequence[int], slots: int, device: torch.device, turns: StepTurns) -> None:
        """turns: of a step's parts."""
        self.memory = SlotMemory(device, slots)
        self.ring = Ring(layers, slots, self.memory)
        self._turns = turns
        # By layer: how many parts of the step have computed it.
        self._passed: Counter[int] = Counter()
        self._ended = 0

    def begin(self) -> None:
        if self._turns.part == 0:
            self._passed.clear()
            self._ended = 0
            self.ring.begin()

    def passed(self, layer: int) -> None:
        self._passed[layer] += 1
        if self._passed[layer] == self._turns.parts:
            self.ring.passed(layer)

    def end(self) -> None:
        self._ended += 1
        if self._ended == self._turns.parts:
            self.ring.end()

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
