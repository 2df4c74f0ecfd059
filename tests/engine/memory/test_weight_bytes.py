"""The reckoned sizes of weights are those of the model's own tensors."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from capacity.shapes import EXPERTS, SHAPES
from engine.exchange.alone import Alone
from engine.memory.weight_bytes import weight_bytes
from engine.model.config import ModelConfig, parse_model_config
from engine.model.quantization import KeptWeights
from engine.parallel.layout import Layout, Place
from engine.weights.loading import make_allocator
from engine.weights.sizes import sizes_of
from mesh.errors import ConfigError
from tests.support.combinations import crossed
from tests.support.packed import CONFIGS

LAYOUTS = {
    "one rank": Layout(),
    "dp 4": Layout(dp=4, ep=4),
    "dp 3": Layout(dp=3, ep=3),
    "tp 4": Layout(tp=4, ep=4),
    "tp 4, ep 1": Layout(tp=4),
    "tp 2, dp 2": Layout(tp=2, dp=2, ep=4),
}


def shape(name: str, experts: str, drafts: int = 0) -> ModelConfig:
    values = {**SHAPES[name], "num_hidden_layers": 5, "num_nextn_predict_layers": 1}
    config = parse_model_config({**values, "quantization_config": EXPERTS[experts]})
    return replace(config, draft_layers=drafts)


@crossed(
    name__experts__weights=list(
        product(
            ["r1", "moonlight", "glm-flash", "v32", "glm-5"],
            ["fp8", "w4a8", "nvfp4", "bf16"],
            ["quantized", "dequantized"],
        )
    ),
    layout=list(LAYOUTS),
)
def test_reckoned_weights_are_those_of_the_model(name: str, experts: str, weights: KeptWeights, layout: str) -> None:
    config = shape(name, experts, drafts=1)
    exchange = Alone(Place(LAYOUTS[layout]))
    try:
        allocate = make_allocator(config, torch.bfloat16, torch.device("meta"), weights, exchange)
    except ConfigError as error:
        with pytest.raises(ConfigError) as reckoned:
            weight_bytes(config, LAYOUTS[layout], weights)
        assert reckoned.value.message == error.message
        return
    counted, found = sizes_of(config, allocate), weight_bytes(config, LAYOUTS[layout], weights)
    assert (found.total, found.layer_experts) == (counted.weights, counted.layer_experts)


def test_groups_of_32_take_what_the_models_tiles_do() -> None:
    values = {**SHAPES["r1"], "num_hidden_layers": 5, "quantization_config": CONFIGS["compressed-tensors"]}
    config = parse_model_config(values)
    allocate = make_allocator(config, torch.bfloat16, torch.device("meta"), "quantized")
    counted, found = sizes_of(config, allocate), weight_bytes(config, Layout())
    assert (found.total, found.layer_experts) == (counted.weights, counted.layer_experts)


@pytest.mark.parametrize("weights", ["fp8", "w4a8"])
def test_weights_quantized_at_load_take_what_published_ones_do(weights: KeptWeights) -> None:
    plain, published = shape("moonlight", "bf16"), shape("moonlight", weights)
    at_load, as_published = weight_bytes(plain, Layout(), weights), weight_bytes(published, Layout())
    # What is quantized at load expands keys and values in bfloat16, and has no scales of inputs from calibration.
    assert at_load.total == pytest.approx(as_published.total, rel=0.01)


def test_a_copy_takes_an_experts_room_in_each_layer() -> None:
    config = shape("r1", "w4a8")
    found = weight_bytes(config, LAYOUTS["dp 4"])
    assert found.with_copies(2).total - found.total == 2 * found.copy * found.expert_layers
    assert found.copy * config.n_routed_experts // 4 == found.layer_experts
