"""The ring against a device that runs copies and steps in any order that events allow."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from engine.offload.ring import Ring

STEPS = 4


@dataclass(frozen=True)
class Operation:
    """Begins once all earlier operations of its stream are done, and `after` operations of the other stream."""

    kind: str
    layer: int
    slot: int
    after: int


class FakeDevice:
    """Two streams. `Copies` of the ring puts copies in one; the test puts readers of experts in the other."""

    def __init__(self) -> None:
        self.copies: list[Operation] = []
        self.steps: list[Operation] = []
        # How many copies had been enqueued up to each slot's last one, and for how many copies the steps wait.
        self._copied: dict[int, int] = {}
        self._waits = 0

    def start(self, layer: int, slot: int) -> None:
        self.copies.append(Operation("copy", layer, slot, len(self.steps)))
        self._copied[slot] = len(self.copies)

    def wait(self, slot: int) -> None:
        self._waits = max(self._waits, self._copied[slot])

    def read(self, layer: int, slot: int) -> None:
        self.steps.append(Operation("read", layer, slot, self._waits))

    def compute(self) -> None:
        """Something that reads no slot."""
        self.steps.append(Operation("compute", -1, -1, self._waits))

    def run(self, choose: Callable[[Sequence[str]], str]) -> None:
        """Run everything in an order that `choose` draws. A copy leaves its slot torn from its begin to its end. A
        reader must find its layer whole from its begin to its end.
        """
        held: dict[int, int | None] = {}
        done, under_way = {"copy": 0, "step": 0}, dict[str, Operation]()
        while True:
            ready = [f"end {name}" for name in under_way]
            for name, stream, other in (("copy", self.copies, "step"), ("step", self.steps, "copy")):
                at = done[name]
                if name not in under_way and at < len(stream) and stream[at].after <= done[other]:
                    ready.append(f"begin {name}")
            if not ready:
                break
            action, name = choose(ready).split()
            if action == "begin":
                under_way[name] = (self.copies if name == "copy" else self.steps)[done[name]]
            else:
                operation = under_way.pop(name)
                done[name] += 1
                if operation.kind == "copy":
                    held[operation.slot] = operation.layer
            copy = under_way.get("copy")
            if copy is not None:
                held[copy.slot] = None
            reader = under_way.get("step")
            if reader is not None and reader.kind == "read":
                assert held.get(reader.slot) == reader.layer
        assert done == {"copy": len(self.copies), "step": len(self.steps)}


ORDERS: dict[str, Callable[[Sequence[str]], str]] = {
    "copies late": lambda ready: max(ready, key=lambda each: each.endswith("step")),
    "copies early": lambda ready: max(ready, key=lambda each: each.endswith("copy")),
    **{f"seed {seed}": random.Random(seed).choice for seed in range(5)},
}


def compute_step(ring: Ring, device: FakeDevice, layers: int, parts: int = 1) -> None:
    ring.begin()
    for layer in range(layers):
        for _ in range(parts):
            device.compute()
            if layer in ring.layers:
                ring.take(layer)
                device.read(layer, ring.slot_of(layer))
        ring.passed(layer)
    ring.end()
    device.compute()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("layers", [(3, 5, 7, 9), (0, 2, 4, 6, 8), tuple(range(10)), (2, 3, 4, 9)])
def test_every_reader_finds_its_layer_whole(layers: tuple[int, ...], slots: int, parts: int, order: str) -> None:
    device = FakeDevice()
    ring = Ring(layers, slots, device)
    for _ in range(STEPS):
        compute_step(ring, device, 10, parts)
    device.run(ORDERS[order])


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("count", [4, 5, 6, 7])
def test_a_step_copies_each_layer_once(slots: int, count: int) -> None:
    device = FakeDevice()
    ring = Ring(range(count), slots, device)
    compute_step(ring, device, count)
    before = len(device.copies)
    compute_step(ring, device, count)
    assert sorted(copy.layer for copy in device.copies[before:]) == list(range(count))


@pytest.mark.parametrize("slots", [1, 2])
def test_a_copy_begins_as_soon_as_its_slot_is_free(slots: int) -> None:
    device = FakeDevice()
    ring = Ring([1, 3, 5, 7], slots, device)
    compute_step(ring, device, 8)
    device.copies.clear()
    device.steps.clear()
    compute_step(ring, device, 8)
    # A layer with experts is two operations, another layer one. The ring's first layer is left from the step before.
    after = {copy.layer: copy.after for copy in device.copies}
    assert after == ({3: 3, 5: 6, 7: 9, 1: 12} if slots == 1 else {3: 0, 5: 3, 7: 6, 1: 9})


def test_a_step_ends_without_copies_in_flight() -> None:
    device = FakeDevice()
    compute_step(Ring([0, 1, 2], 2, device), device, 3)
    assert device.steps[-1].after == len(device.copies)


@pytest.mark.parametrize("order", ORDERS)
def test_a_replayed_step_may_follow_any_other(order: str) -> None:
    """As with a captured graph, the operations of the second step are enqueued again without asking the ring."""
    device = FakeDevice()
    ring = Ring([0, 2, 4, 5, 7], 2, device)
    compute_step(ring, device, 8)
    marks = len(device.copies), len(device.steps)
    compute_step(ring, device, 8)
    copies, steps = device.copies[marks[0] :], device.steps[marks[1] :]

    def replay() -> None:
        later = len(device.copies) - marks[0], len(device.steps) - marks[1]
        device.copies += [Operation(each.kind, each.layer, each.slot, each.after + later[1]) for each in copies]
        device.steps += [Operation(each.kind, each.layer, each.slot, each.after + later[0]) for each in steps]

    replay()
    compute_step(ring, device, 8)
    replay()
    replay()
    device.run(ORDERS[order])


@pytest.mark.parametrize("order", ORDERS)
def test_parts_that_run_apart_fetch_again_what_the_other_replaced(order: str) -> None:
    device = FakeDevice()
    ring = Ring([0, 1, 2, 3], 2, device)
    ring.begin()
    # One micro-batch is up to two layers ahead of the other.
    for layer in (0, 1, 2, 0, 3, 1, 2, 3):
        ring.take(layer)
        device.read(layer, ring.slot_of(layer))
    ring.end()
    device.run(ORDERS[order])
