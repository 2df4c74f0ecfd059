"""The moves by which one placement becomes another while steps go on. Pure."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from engine.balance.placement import ExpertPlacement


@dataclass(frozen=True, slots=True)
class Move:
    """Slots that get new contents at once. `sources` has pairs: such a slot, and the slot of another part that holds
    the contents before. There is one pair, or there are two that swap.
    """

    sources: tuple[tuple[int, int], ...]
    # The placement once the move is made.
    placement: ExpertPlacement


def moves(placement: ExpertPlacement, target: ExpertPlacement, hosts: int = 1) -> Iterator[Move]:
    """Moves that lead from one placement to the other; after each of them every expert still has a slot. A move
    overwrites a copy that can be spared, or else swaps two slots. In the end each part has the experts that it has in
    the target, in whichever of its slots. Contents come from the same host if one of its parts has them.
    """
    held, parts, slots = list(placement.experts), placement.parts, placement.slots
    slots_a_host = len(held) // hosts
    wanted = [set(target.part(part)) for part in range(parts)]
    lacking = [wanted[part].difference(placement.part(part)) for part in range(parts)]
    # Slots with experts that their parts should not have: in each part as many as it lacks experts.
    wrong = [slot for slot, expert in enumerate(held) if expert not in wanted[slot // slots]]
    copies = Counter(held)

    def hold(slot: int, expert: int) -> None:
        held[slot] = expert
        part = slot // slots
        if expert in lacking[part]:
            lacking[part].remove(expert)
            wrong.remove(slot)

    def nearest(expert: int, first: int) -> int:
        """A slot with the expert, on the host with that first slot if there is one."""
        own = held[first : first + slots_a_host]
        return first + own.index(expert) if expert in own else held.index(expert)

    while wrong:
        spared = next((slot for slot in wrong if copies[held[slot]] > 1), None)
        if spared is not None:
            expert = min(lacking[spared // slots])
            source = nearest(expert, spared // slots_a_host * slots_a_host)
            copies[held[spared]] -= 1
            copies[expert] += 1
            hold(spared, expert)
            yield Move(((spared, source),), ExpertPlacement(tuple(held), parts))
        else:
            # No misplaced expert has a second copy, so two slots must swap. A swap that puts both experts where they
            # belong is best.
            slot = wrong[0]
            given = held[slot]
            others = [held.index(expert) for expert in sorted(lacking[slot // slots])]
            other = next((each for each in others if given in lacking[each // slots]), others[0])
            hold(slot, held[other])
            hold(other, given)
            yield Move(((slot, other), (other, slot)), ExpertPlacement(tuple(held), parts))
