"""Plain checkpoints that are quantized while they are loaded."""

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.exchange.alone import Alone
from engine.model.config import read_model_config
from engine.model.expert_group import ExpertGroup
from engine.model.formats.at_load import Scratch
from engine.model.formats.interface import Experts, ExpertShape
from engine.model.parameters import Part
from engine.model.quantization import KeptWeights
from engine.settings.device import Hardware, resolve
from engine.weights.checkpoint import load_weights
from engine.weights.loading import load_model, make_allocator, settle
from engine.weights.reader import Reader
from engine.weights.shards import open_shards
from mesh.errors import ConfigError
from tests.support.checkpoints import random_prompt, tiny_checkpoint
from tests.support.oracle_model import our_logits, relative_error
from tools.quantize.forms import Format
from tools.quantize.run import Options, quantize

CPU = torch.device("cpu")
# What blocks and groups of 128 divide.
WIDE = {"moe_intermediate_size": 128, "intermediate_size": 256, "q_lora_rank": 128, "v_head_dim": 32}
FORMS: dict[KeptWeights, Format] = {"fp8": Format.FP8, "w4a8": Format.W4A8}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    return tiny_checkpoint(folder, dtype="bfloat16", num_nextn_predict_layers=0, n_shared_experts=2, **WIDE)


def experts_of(directory: Path, weights: KeptWeights, shared: int) -> Experts:
    """The experts of the first layer that has some."""
    with open_shards(directory) as shards:
        config = settle(read_model_config(directory), shards)
        shape = ExpertShape(config.n_routed_experts, shared, config.hidden_size, config.moe_intermediate_size)
        experts = make_allocator(config, torch.bfloat16, CPU, weights).experts(shape)
        part = Part(list(experts.parameters("model.layers.1.mlp")), lambda: experts.finish(ExpertGroup(Alone())))
        load_weights(Reader(shards, CPU), [part], unused=("model.", "lm_head."))
    return experts


@pytest.mark.parametrize("weights", FORMS)
def test_experts_are_those_of_a_quantized_checkpoint(weights: KeptWeights, plain: Path, tmp_path: Path) -> None:
    quantize(Options(plain, tmp_path / "quantized", FORMS[weights], CPU))
    # Shared experts are multiplied with the routed ones if these are in FP8 too.
    shared = 2 if weights == "fp8" else 0
    expected = experts_of(tmp_path / "quantized", "quantized", shared).weights()
    found = experts_of(plain, weights, shared).weights()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("weights", FORMS)
def test_logits_are_as_near_as_those_of_a_quantized_checkpoint(
    weights: KeptWeights, device: str, plain: Path, tmp_path: Path
) -> None:
    quantize(Options(plain, tmp_path / "quantized", FORMS[weights], CPU))
    tokens = random_prompt(40)
    exact = our_logits(plain, tokens, [1], [40])

    def error(directory: Path, kept: KeptWeights) -> float:
        found = our_logits(directory, tokens, [1], [39, 1], device=device, dtype=torch.bfloat16, weights=kept)
        return relative_error(found.cpu(), exact)

    assert 0.01 < error(plain, weights) < 1.3 * error(tmp_path / "quantized", "quantized")


def test_layers_share_the_memory_of_their_published_weights() -> None:
    scratch = Scratch()
    first = scratch.take([(2, 3), (4, 5)], lambda *shape, dtype=None: torch.empty(shape))
    second = scratch.take([(2, 3)], lambda *shape, dtype=None: torch.empty(shape))
    assert second[0] is first[0]
    scratch.leave()
    scratch.leave()
    assert scratch.take([(2, 3)], lambda *shape, dtype=None: torch.empty(shape))[0] is not first[0]


def test_quantized_weights_are_not_quantized_again(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, dtype="float8", num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match=r"engine\.weights=w4a8 quantizes plain weights"):
        load_model(checkpoint, torch.bfloat16, CPU, "w4a8")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [({"dtype": "float32"}, "set engine.dtype=bfloat16"), ({"offload": {"layers": 3}}, "excludes engine.offload")],
    ids=["dtype", "offload"],
)
def test_settings_that_contradict_it_are_refused(settings: dict[str, object], complaint: str) -> None:
    config = EngineConfig.model_validate({"model_dir": "model", "weights": "fp8", "dtype": "bfloat16", **settings})
    with pytest.raises(ConfigError, match=complaint):
        resolve(config, Hardware(cuda_devices=1, free_memory_bytes=1 << 30))
