"""How one placement becomes another while tokens go on choosing experts. Pure."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from engine.balance.placement import Placement


@dataclass(frozen=True, slots=True)
class Move:
    """Slots that get new contents at once: by slot, the slot that holds them before. At most two."""

    sources: tuple[tuple[int, int], ...]
    # What holds when it is made.
    placement: Placement


def moves(placement: Placement, target: Placement) -> Iterator[Move]:
    """Moves after each of which every expert has a slot: over a copy that can be spared, else two slots swap."""
    held, wanted = list(placement.experts), target.experts
    parts = placement.parts
    copies = Counter(held)
    while True:
        wrong = [slot for slot in range(len(held)) if held[slot] != wanted[slot]]
        if not wrong:
            return
        spared = next((slot for slot in wrong if copies[held[slot]] > 1), None)
        if spared is not None:
            source = held.index(wanted[spared])
            copies[held[spared]] -= 1
            copies[wanted[spared]] += 1
            held[spared] = wanted[spared]
            yield Move(((spared, source),), Placement(tuple(held), parts))
        else:
            # Each wrong slot holds the only copy of an expert: what it lacks is in another wrong one.
            slot = wrong[0]
            other = held.index(wanted[slot])
            held[slot], held[other] = held[other], held[slot]
            yield Move(((slot, other), (other, slot)), Placement(tuple(held), parts))
