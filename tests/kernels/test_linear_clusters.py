"""Linear layers of few tokens by clusters: how they are tiled, and on Hopper against their definition."""

import pytest
import torch

from kernels.hopper import MOST_CLUSTERS, ClusterTiling
from kernels.linear import clusters, linear, reference
from kernels.linear.clusters import TILINGS, choose_tiling
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

# Outputs and inputs of attention's layers: Moonlight's input and output; GLM-4.7-Flash's input, queries and output.
SHAPES = [(3648, 2048), (2048, 2048), (1344, 2048), (5120, 768), (2048, 5120)]
ERROR = 3e-3


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_all_ctas_of_a_product_run_at_once(outputs: int, inputs: int) -> None:
    tiling = choose_tiling(outputs, inputs)
    assert tiling is not None and tiling.tiles(outputs) <= MOST_CLUSTERS[tiling.ctas]


def test_a_head_is_not_tiled() -> None:
    assert choose_tiling(163840, 2048) is None


def test_no_more_ctas_share_a_tile_than_it_has_units() -> None:
    tiling = choose_tiling(64, 128)
    assert tiling is not None and tiling.ctas <= 2


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tokens", [2, 7, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (72, 128), (200, 1216), *SHAPES])
def test_tokens_are_multiplied_by_the_weight(tokens: int, outputs: int, inputs: int) -> None:
    x, weight = random(tokens, inputs), random(outputs, inputs)
    assert clusters.takes(x, weight)
    assert relative_error(linear(x, weight), reference.linear(x.double(), weight.double())) < ERROR


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("tokens", [5, 30, 60])
def test_every_tiling_gives_the_same_product(tokens: int, tiling: ClusterTiling) -> None:
    x, weight = random(tokens, 64 * 19), random(712, 64 * 19)
    found = clusters.linear(x, weight, tiling)
    assert relative_error(found, reference.linear(x.double(), weight.double())) < ERROR


@pytest.mark.gpu
@on_hopper
def test_one_token_many_tokens_and_other_shapes_are_not_taken() -> None:
    x, weight = random(4, 1024), random(256, 1024)
    assert clusters.takes(x, weight)
    assert not clusters.takes(x[:1], weight)
    assert not clusters.takes(random(65, 1024), weight)
    assert not clusters.takes(random(4, 1000), random(256, 1000))
    assert not clusters.takes(x, weight[:250])
    assert not clusters.takes(random(4, 1028)[:, :1024], weight)
    assert not clusters.takes(x.float(), weight.float())
