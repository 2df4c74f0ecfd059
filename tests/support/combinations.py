"""Parameters of tests that cross: all their combinations on a GPU, fewer where Triton's kernels are interpreted."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from tests.support.gpus import has_gpu


def crossed(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by the values of each axis. An axis "a__b" has tuples: values of the parameters a and b.

    On a GPU the test runs with all combinations. Elsewhere it runs as often as the longest axis has values, and each
    value of the others comes in turn.
    """
    names = [name for axis in axes for name in axis.split("__")]
    combinations = product(*axes.values()) if has_gpu() else in_turn(list(axes.values()))
    return pytest.mark.parametrize(names, [_flat(axes, values) for values in combinations])


def in_turn(axes: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Each value of each axis at least once."""
    # An axis moves on once more after each round, so that axes of as many values do not go in step.
    return [
        tuple(values[(index + number * (index // len(values))) % len(values)] for number, values in enumerate(axes))
        for index in range(max(map(len, axes)))
    ]


def _flat(axes: dict[str, Sequence[Any]], values: tuple[Any, ...]) -> list[Any]:
    return [one for axis, value in zip(axes, values, strict=True) for one in (value if "__" in axis else (value,))]
