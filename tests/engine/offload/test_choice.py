"""Which layers' experts lie in host memory."""

import pytest

from engine.offload.choice import MemoryNeed, fewest_layers, spread
from mesh.errors import ConfigError

GB = 10**9


def need(weights: int, free: int) -> MemoryNeed:
    """With layers whose experts take 3 GB."""
    return MemoryNeed(weights=weights * GB, layer_experts=3 * GB, work=8 * GB, kv=2 * GB, free=free * GB)


def test_no_layer_is_in_host_memory_if_all_fit() -> None:
    assert fewest_layers(need(130, 140), 2, 58) == 0


@pytest.mark.parametrize(("weights", "layers"), [(131, 3), (133, 3), (134, 4), (188, 22)])
def test_the_fewest_layers_that_make_the_rest_fit(weights: int, layers: int) -> None:
    assert fewest_layers(need(weights, 140), 2, 58) == layers
    saved = (layers - 2) * 3
    assert weights + 10 - saved <= 140 < weights + 10 - saved + 3


def test_one_slot_saves_a_layer_more() -> None:
    assert fewest_layers(need(188, 140), 1, 58) == 21


def test_too_little_memory_for_all_else_is_said_in_numbers() -> None:
    with pytest.raises(ConfigError, match=r"all 58 layers a GPU still needs 132\.0 GB for weights, 8\.0 GB for steps"):
        fewest_layers(need(300, 140), 2, 58)


def test_layers_in_host_memory_are_spread_evenly() -> None:
    assert spread(range(3, 61), 3) == (3, 22, 41)
    assert spread(range(3, 61), 58) == tuple(range(3, 61))
    assert spread(range(3, 61), 0) == ()


@pytest.mark.parametrize("count", range(1, 59))
def test_distances_differ_by_one_layer_at_most(count: int) -> None:
    chosen = spread(range(58), count)
    # The distance from the last layer to the first one of the next step counts too.
    distances = [after - before for before, after in zip(chosen, (*chosen[1:], 58), strict=True)]
    assert len(chosen) == count and max(distances) - min(distances) <= 1
