import pytest

from bench.node.agreement import LAYOUT, agree
from tests.support.rank_threads import on_each_rank


@pytest.mark.parametrize("alike", [False, True])
def test_a_rank_is_busy_only_while_it_agrees(alike: bool) -> None:
    for steps in on_each_rank(LAYOUT, lambda peers: agree(peers, 0.001, 1 << 12, 20, alike)):
        assert len(steps) == 20
        assert all(0 < step.busy <= step.ended - step.begun for step in steps)
