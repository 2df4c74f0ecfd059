"""The order in which layers' experts come from host memory into a few slots of a GPU's. Pure: copies are a protocol.

Each layer always uses the same slot, so that kernels and captured graphs always find its weights at one
address. Copies run one after another on a stream of their own. A copy into a slot begins when the layers that read the
slot are computed, and a layer is computed when its copy is done. Events on the device order both; the host never waits.

A step begins and ends with the first layer's experts in their slot and with no copy in flight. So each step, captured
or not, can follow any other.
"""

from collections.abc import Sequence
from typing import Protocol


class Copies(Protocol):
    """To be called while steps are launched, which may be captured."""

    def start(self, layer: int, slot: int) -> None:
        """Copy the layer's experts to the slot, after what the steps' stream and the copies' have been given so far."""

    def wait(self, slot: int) -> None:
        """What the steps' stream is given from now on waits for the slot's last copy."""


class Ring:
    """Steps call `begin`, `take` before each use of a layer's experts, `passed` after the layer, and `end`."""

    def __init__(self, layers: Sequence[int], slots: int, copies: Copies) -> None:
        """layers: those in host memory, in the order in which steps compute them; more than slots."""
        assert len(layers) > slots > 0
        self.layers = tuple(layers)
        self._copies = copies
        self._numbers = {layer: number for number, layer in enumerate(layers)}
        # By slot: the layer whose experts it has, or gets by a copy that was started; None if that is not known.
        self._held: list[int | None] = [None] * slots
        # Slots into which a copy was started that nothing waits for yet.
        self._arriving: set[int] = set()

    def slot_of(self, layer: int) -> int:
        return self._numbers[layer] % len(self._held)

    def begin(self) -> None:
        """Called before the first layer."""
        # Forget what other slots hold: a captured step could not know it when it is replayed.
        self._held[1:] = [None] * (len(self._held) - 1)
        for layer in self.layers[: len(self._held)]:
            self._bring(layer)

    def take(self, layer: int) -> None:
        """What the steps' stream is given next finds the layer's experts in its slot."""
        # If layers are computed in another order, the experts may be gone; then they are copied once more.
        self._bring(layer)
        slot = self.slot_of(layer)
        if slot in self._arriving:
            self._arriving.remove(slot)
            self._copies.wait(slot)

    def passed(self, layer: int) -> None:
        """The steps' stream has been given all that reads the layer's experts: its slot is free after that work."""
        if layer not in self._numbers:
            return
        following = self._numbers[layer] + len(self._held)
        if following < len(self.layers):
            self._bring(self.layers[following])
        elif self.slot_of(layer) == 0:
            # For the next step.
            self._bring(self.layers[0])

    def end(self) -> None:
        self._bring(self.layers[0])
        for slot in sorted(self._arriving):
            self._copies.wait(slot)
        self._arriving.clear()

    def _bring(self, layer: int) -> None:
        slot = self.slot_of(layer)
        if self._held[slot] != layer:
            self._held[slot] = layer
            self._arriving.add(slot)
            self._copies.start(layer, slot)
