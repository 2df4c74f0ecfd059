"""Which parts of the model each rank holds, and which groups it is in."""

import pytest
from pydantic import ValidationError

from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Group, Layout, Place


def places(layout: Layout) -> list[Place]:
    return [Place(layout, rank) for rank in range(layout.world)]


def test_a_worker_of_one_rank_holds_everything() -> None:
    assert Layout.of(ParallelConfig()) == Layout(1, 1, 1)
    assert Place().members(Group.WORLD) == Place().members(Group.TP) == range(1)


def test_by_default_every_rank_holds_whole_experts() -> None:
    assert Layout.of(ParallelConfig(tp=2, dp=2)) == Layout(tp=2, dp=2, ep=4)


def test_neighbours_are_a_tp_group_that_its_first_rank_leads() -> None:
    layout = Layout(tp=2, dp=2, ep=4)
    assert [place.members(Group.TP) for place in places(layout)] == [range(2), range(2), range(2, 4), range(2, 4)]
    assert [(place.dp_index, place.tp_index) for place in places(layout)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [place.leads for place in places(layout)] == [True, False, True, False]


@pytest.mark.parametrize(
    ("ep", "held"),
    [
        (1, [(0, 0), (0, 1), (0, 2), (0, 3)]),
        (2, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (4, [(0, 0), (1, 0), (2, 0), (3, 0)]),
    ],
)
def test_ranks_together_hold_every_part_of_every_expert_once(ep: int, held: list[tuple[int, int]]) -> None:
    layout = Layout(dp=4, ep=ep)
    assert [(place.expert_part, place.width_part) for place in places(layout)] == held
    assert layout.width_parts == 4 // ep


def test_ep_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"engine.parallel.ep=3 does not divide the 4 ranks \(tp \* dp\)"):
        ParallelConfig(tp=2, dp=2, ep=3)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"ranks": 4, "tp": 3}, "engine.parallel.ranks=4 does not fit engine.parallel's tp=3"),
        ({"ranks": 8, "tp": 2, "dp": 2}, "engine.parallel.ranks=8 does not fit engine.parallel's tp=2 and dp=2"),
        ({"dp": 3, "hosts": 2}, "engine.parallel.hosts=2 does not divide the 3 ranks"),
        ({"tp": 2, "hosts": 2}, "engine.parallel.tp=2 does not divide the 1 ranks of each host"),
    ],
)
def test_groups_that_do_not_make_up_the_ranks_are_refused(asked: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ParallelConfig.model_validate(asked)
