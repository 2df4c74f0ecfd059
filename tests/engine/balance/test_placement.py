"""Properties of experts' placements that hold for any load."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.balance.config import BalanceConfig
from engine.balance.moves import moves
from engine.balance.placement import (
    ANYWHERE,
    LEAST_GAIN,
    LEAST_GROUP_GAIN,
    ExpertPlacement,
    Grouping,
    balancing,
    first_placement,
    imbalance,
    imbalances,
    slots_of,
)
from engine.balance.placements import grouping_of
from engine.parallel.layout import Layout

KEPT = BalanceConfig(groups_on_hosts=True)
Case = tuple[ExpertPlacement, list[float], Grouping]


def balanced(placement: ExpertPlacement, loads: list[float], grouping: Grouping = ANYWHERE) -> ExpertPlacement:
    *pieces, found = balancing(placement, loads, grouping)
    assert pieces == [None] * len(pieces) and found is not None
    return found


@st.composite
def loaded(draw: st.DrawFn) -> Case:
    """A placement that balancing made for earlier loads, and the next ones."""
    hosts = draw(st.integers(1, 3))
    parts = hosts * draw(st.integers(1, 5))
    groups = draw(st.sampled_from([hosts, 2 * hosts, 7]))
    experts = groups * draw(st.integers(1, 6))
    grouping = grouping_of(KEPT, Layout(dp=parts, ep=parts, hosts=hosts), groups)
    a_host = experts // grouping.hosts
    redundant = draw(st.integers(0, max(0, min(4, a_host - slots_of(experts, parts, 0)))))
    if parts == 1 or slots_of(experts, parts, redundant) > a_host:
        redundant, parts = 0, grouping.hosts
    each = st.lists(st.floats(0, 1000), min_size=experts, max_size=experts)
    placement = first_placement(experts, parts, redundant, grouping)
    for earlier in draw(st.lists(each, max_size=2)):
        placement = balanced(placement, earlier, grouping)
    return placement, draw(each), grouping


def of_hosts(placement: ExpertPlacement, grouping: Grouping) -> list[ExpertPlacement]:
    """Each host's part of a placement, by itself."""
    size, parts = len(placement.experts) // grouping.hosts, placement.parts // grouping.hosts
    cut = [placement.experts[host * size : (host + 1) * size] for host in range(grouping.hosts)]
    return [ExpertPlacement(held, parts) for held in cut]


def check_complete(placement: ExpertPlacement, experts: int) -> None:
    assert set(placement.experts) == set(range(experts))


@given(loaded())
def test_every_expert_is_somewhere_and_copies_lie_on_different_parts(case: Case) -> None:
    placement, loads, grouping = case
    for each in (placement, balanced(placement, loads, grouping)):
        check_complete(each, len(loads))
        for part in range(each.parts):
            assert len(set(each.part(part))) == each.slots


@given(loaded())
def test_each_group_of_experts_is_whole_on_one_host(case: Case) -> None:
    placement, loads, grouping = case
    size = len(loads) // grouping.groups
    for each in (placement, balanced(placement, loads, grouping)):
        groups = [{expert // size for expert in held.experts} for held in of_hosts(each, grouping)]
        assert sorted(group for held in groups for group in held) == list(range(grouping.groups))
        assert {len(held) for held in groups} == {grouping.groups // grouping.hosts}


def assert_no_exchange_helps(contents: Sequence[set[int]], shares: Mapping[int, float], least_gain: float) -> None:
    """No exchange between two of them lowers the heaviest one's load by more than `least_gain` of their mean."""
    sums = [sum(shares[each] for each in held) for held in contents]
    least = least_gain * sum(sums) / len(sums) * (1 + 1e-6) + 1e-9

    def gains(heavy: int) -> Iterator[float]:
        for light, held in enumerate(contents):
            for given_away in contents[heavy] - held:
                for taken in held - contents[heavy]:
                    moved = shares[given_away] - shares[taken]
                    yield min(moved, sums[heavy] - sums[light] - moved)

    # If several are equally heavy, but for rounding, an exchange with one of them would leave the others.
    heaviest = [index for index, load in enumerate(sums) if load >= max(sums) * (1 - 1e-9)]
    assert any(all(gain <= least for gain in gains(heavy)) for heavy in heaviest)


@given(loaded())
def test_no_exchange_of_two_experts_would_help_the_heaviest_part(case: Case) -> None:
    placement, loads, grouping = case
    for found in of_hosts(balanced(placement, loads, grouping), grouping):
        copies = Counter(found.experts)
        shares = {expert: loads[expert] / copies[expert] for expert in copies}
        assert_no_exchange_helps([set(found.part(part)) for part in range(found.parts)], shares, LEAST_GAIN)


@given(loaded())
def test_no_exchange_of_two_groups_would_help_the_heaviest_host(case: Case) -> None:
    placement, loads, grouping = case
    size = len(loads) // grouping.groups
    of_group = {group: sum(loads[group * size : (group + 1) * size]) for group in range(grouping.groups)}
    found = balanced(placement, loads, grouping)
    contents = [{expert // size for expert in held.experts} for held in of_hosts(found, grouping)]
    assert_no_exchange_helps(contents, of_group, LEAST_GROUP_GAIN)


@given(loaded())
def test_spare_slots_go_to_the_heaviest_copies(case: Case) -> None:
    placement, loads, grouping = case
    balanced_placement = balanced(placement, loads, grouping)
    assert len(balanced_placement.experts) == len(placement.experts)
    for found in of_hosts(balanced_placement, grouping):
        copies = Counter(found.experts)
        for copied in (expert for expert, count in copies.items() if count > 1):
            before = loads[copied] / (copies[copied] - 1)
            others = (expert for expert in copies if copies[expert] < found.parts)
            assert all(before >= loads[expert] / copies[expert] for expert in others)


@given(loaded())
def test_moves_lose_no_expert_on_their_way(case: Case) -> None:
    placement, loads, grouping = case
    target = balanced(placement, loads, grouping)
    held, a_host = list(placement.experts), len(placement.experts) // grouping.hosts
    for move in moves(placement, target, grouping.hosts):
        if len(move.sources) == 1:
            ((slot, source),) = move.sources
            own = held[slot // a_host * a_host : (slot // a_host + 1) * a_host]
            assert slot // a_host == source // a_host or held[source] not in own
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


def test_experts_with_copies_have_a_part_each() -> None:
    # R1's experts with 64 copies, as DeepSeek's decode deployment has them (DeepSeek-V3, 2024, section 3.4.2).
    loads = [1 / (1 + expert) ** 0.8 for expert in range(256)]
    placement = first_placement(256, 320, 0)
    assert placement.slots == 1 and set(placement.experts) == set(range(256))
    found = balanced(placement, loads)
    assert set(found.experts) == set(range(256)) and Counter(found.experts)[0] > 10
    assert imbalance(found, loads) < imbalance(placement, loads) / 10
    *_, last = moves(placement, found, hosts=40)
    assert sorted(last.placement.experts) == sorted(found.experts)


def test_copies_are_taken_from_the_same_host_first() -> None:
    # Four parts on two hosts. The last part gets expert 0, which a part of each host has.
    placement = ExpertPlacement((0, 1, 2, 3, 0, 1, 4, 2), 4)
    target = ExpertPlacement((0, 1, 2, 3, 0, 1, 4, 0), 4)
    (near,), (first,) = moves(placement, target, hosts=2), moves(placement, target)
    assert (near.sources, first.sources) == (((7, 4),), ((7, 0),))


@pytest.mark.parametrize(
    ("layout", "groups", "hosts"),
    [
        (Layout(dp=16, ep=16, hosts=2), 8, 2),
        # Hosts that groups do not divide, that have one part each, and that share a part with another.
        (Layout(dp=320, ep=320, hosts=40), 8, 1),
        (Layout(dp=2, ep=2, hosts=2), 8, 1),
        (Layout(dp=6, ep=3, hosts=2), 8, 1),
    ],
)
def test_groups_are_kept_on_hosts_that_can_share_them(layout: Layout, groups: int, hosts: int) -> None:
    assert grouping_of(KEPT, layout, groups).hosts == hosts
    assert grouping_of(BalanceConfig(), layout, groups) == ANYWHERE
