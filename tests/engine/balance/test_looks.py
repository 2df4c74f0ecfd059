"""When ranks look at which experts were chosen."""

import numpy as np
import pytest

from engine.balance.looks import LEAST_CHOICES, next_look, tells_enough


@pytest.mark.parametrize(
    ("interval", "expected"),
    [(1000, [64, 128, 256, 512, 1024, 2024, 3024]), (100, [64, 128, 228, 328]), (16, [16, 32, 48, 64])],
)
def test_the_first_looks_come_soon(interval: int, expected: list[int]) -> None:
    found = [next_look(0, interval)]
    while len(found) < len(expected):
        found.append(next_look(found[-1], interval))
    assert found == expected


def test_few_choices_move_experts_only_after_an_interval() -> None:
    many, few = np.full((3, 8), LEAST_CHOICES), np.full((3, 8), LEAST_CHOICES)
    few[1, 0] -= 1
    assert tells_enough(many, 64, 1000) and not tells_enough(few, 64, 1000)
    assert tells_enough(few, 1000, 1000)
