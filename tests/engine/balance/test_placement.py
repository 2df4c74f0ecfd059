"""Properties of experts' placements that hold for any load."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.balance.moves import moves
from engine.balance.placement import ExpertPlacement, balancing, first_placement, imbalance, imbalances


def balanced(placement: ExpertPlacement, loads: list[float]) -> ExpertPlacement:
    *pieces, found = balancing(placement, loads)
    assert pieces == [None] * len(pieces) and found is not None
    return found


@st.composite
def loaded(draw: st.DrawFn) -> tuple[ExpertPlacement, list[float]]:
    parts = draw(st.integers(1, 5))
    own = draw(st.integers(1, 6))
    experts = parts * own
    redundant = draw(st.integers(0, min(4, experts - own))) if parts > 1 else 0
    each = st.lists(st.floats(0, 1000), min_size=experts, max_size=experts)
    placement = first_placement(experts, parts, redundant)
    for earlier in draw(st.lists(each, max_size=2)):
        placement = balanced(placement, earlier)
    return placement, draw(each)


def check_complete(placement: ExpertPlacement, experts: int) -> None:
    assert set(placement.experts) == set(range(experts))


@given(loaded())
def test_every_expert_is_somewhere_and_copies_lie_on_different_parts(case: tuple[ExpertPlacement, list[float]]) -> None:
    placement, loads = case
    for each in (placement, balanced(placement, loads)):
        check_complete(each, len(loads))
        for part in range(each.parts):
            assert len(set(each.part(part))) == each.slots


@given(loaded())
def test_no_exchange_of_two_experts_would_help_the_heaviest_part(case: tuple[ExpertPlacement, list[float]]) -> None:
    placement, loads = case
    found = balanced(placement, loads)
    copies = Counter(found.experts)
    shares = [loads[expert] / copies[expert] for expert in range(len(loads))]
    contents = [set(found.part(part)) for part in range(found.parts)]
    sums = [sum(shares[expert] for expert in held) for held in contents]
    heavy = max(range(found.parts), key=lambda part: sums[part])
    least = 0.005 * sum(sums) / len(sums)
    for light, held in enumerate(contents):
        for given_away in contents[heavy] - held:
            for taken in held - contents[heavy]:
                moved = shares[given_away] - shares[taken]
                assert min(moved, sums[heavy] - sums[light] - moved) <= least * (1 + 1e-6) + 1e-9


@given(loaded())
def test_spare_slots_go_to_the_heaviest_copies(case: tuple[ExpertPlacement, list[float]]) -> None:
    placement, loads = case
    found = balanced(placement, loads)
    copies = Counter(found.experts)
    assert len(found.experts) == len(placement.experts)
    for copied in (expert for expert, count in copies.items() if count > 1):
        before = loads[copied] / (copies[copied] - 1)
        others = (expert for expert in copies if copies[expert] < found.parts)
        assert all(before >= loads[expert] / copies[expert] for expert in others)


@given(loaded())
def test_moves_lose_no_expert_on_their_way(case: tuple[ExpertPlacement, list[float]]) -> None:
    placement, loads = case
    target = balanced(placement, loads)
    held = list(placement.experts)
    for move in moves(placement, target):
        contents = [(slot, held[source]) for slot, source in move.sources]
        assert all(slot // placement.slots != source // placement.slots for slot, source in move.sources)
        for slot, expert in contents:
            held[slot] = expert
        assert tuple(held) == move.placement.experts
        check_complete(move.placement, len(loads))
    reached = ExpertPlacement(tuple(held), placement.parts)
    assert all(set(reached.part(part)) == set(target.part(part)) for part in range(placement.parts))


def test_imbalance_is_the_heaviest_parts_excess_over_the_mean() -> None:
    held = np.array([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 2, 1], [0, 1, 2, 3, 0, 1]])
    loads = np.array([[2.0, 4, 3, 6], [1, 4, 4, 6], [0, 0, 0, 0]])
    # Loads of the two parts: 6 and 9, 5 and 10, 0 and 0.
    assert imbalances(held, 2, loads).tolist() == pytest.approx([0.2, 1 / 3, 0])


def test_even_load_moves_nothing() -> None:
    placement = first_placement(16, 4, 0)
    assert balanced(placement, [1.0] * 16) == placement


@pytest.mark.parametrize(("redundant", "most"), [(0, 0.1), (2, 0.02)])
def test_skewed_load_is_evened(redundant: int, most: float) -> None:
    # Zipf's law over R1's experts, in the order of the checkpoint: the first part has most of it.
    loads = [1 / (1 + expert) ** 0.8 for expert in range(256)]
    placement = first_placement(256, 4, redundant)
    assert imbalance(placement, loads) > 1
    assert imbalance(balanced(placement, loads), loads) < most
