"""Shared experts in the experts' grouped products against a feed-forward layer of their own, as they are published."""

import pytest
import torch

from engine.model.config import ModelConfig, parse_model_config
from engine.model.feed_forward import FeedForward
from engine.model.moe import MixtureOfExperts
from engine.model.normalized import Normalized
from engine.model.parameters import Allocator, NamedParameters, published_shape
from engine.weights.random_weights import fill_randomly
from kernels.act_quant import quantize
from kernels.moe_permute import ExpertOutputs, combine
from kernels.norm import Delta
from tests.support.errors import relative_error
from tools.make_checkpoint import checkpoint_config

SHARED = "mlp.shared_experts"


def config_with(shared: int, **overrides: object) -> ModelConfig:
    return parse_model_config(checkpoint_config("tiny", overrides={"n_shared_experts": shared, **overrides}))


def random_mixture(config: ModelConfig, allocate: Allocator) -> MixtureOfExperts:
    mixture = MixtureOfExperts(config, allocate)
    fill_randomly(dict(mixture.parameters("mlp")))
    return mixture


def random_tokens(count: int, config: ModelConfig, allocate: Allocator) -> Normalized:
    plain = torch.randn(count, config.hidden_size).to(allocate.dtype)
    return Normalized(plain, quantize(plain) if allocate.fp8 else None)


def fill(target: NamedParameters, source: NamedParameters) -> None:
    """Copies published tensors from one module's places to another's."""
    published = {name: place.reshape(published_shape(place)) for name, place in source}
    for name, place in target:
        place.copy_(published[name])


def outputs_of(delta: Delta) -> ExpertOutputs:
    assert isinstance(delta, ExpertOutputs)
    return delta


@pytest.mark.parametrize("tokens", [0, 1, 50, 400])
@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "FP8"])
def test_shared_experts_add_what_a_layer_of_their_own_would(tokens: int, shared: int, fp8: bool) -> None:
    # Few tokens and many: both layouts of FP8 experts.
    config = config_with(shared, moe_intermediate_size=128)
    allocate = Allocator(torch.bfloat16 if fp8 else torch.float32, torch.device("cpu"), fp8=fp8)
    mixture = random_mixture(config, allocate)
    assert mixture.quantized == fp8
    alone = FeedForward(config.hidden_size, shared * config.moe_intermediate_size, allocate)
    fill(alone.parameters(SHARED), mixture.parameters("mlp"))
    hidden = random_tokens(tokens, config, allocate)
    outputs, chosen = outputs_of(mixture.forward(hidden)), config.num_experts_per_tok
    positions, weights = (each[:, :chosen].contiguous() for each in (outputs.positions, outputs.weights))
    expected = combine(ExpertOutputs(outputs.rows, positions, weights)) + alone.forward(hidden)
    assert relative_error(combine(outputs), expected) < (1e-2 if fp8 else 1e-5)
