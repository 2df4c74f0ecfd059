"""INT4 checkpoints that other tools packed, against the float32 models that they stand for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.config import parse_model_config, read_model_config
from engine.model.parameters import Parameter, Part
from engine.model.quantization import Quantization, Stored
from engine.weights.checkpoint import load_weights
from engine.weights.loading import load_model
from engine.weights.reader import Reader
from engine.weights.shards import open_shards
from mesh.errors import CheckpointError, ConfigError
from tests.support.checkpoints import generate, model_backend, random_prompt, read_tensors, rewrite_as_one_file
from tests.support.oracle_model import assert_greedy, load_oracle, oracle_logits, our_logits, relative_error
from tests.support.packed import CONFIGS, as_kimi_k25, compressed_config, only_vision, packed_checkpoint
from tools.make_checkpoint import checkpoint_config

CPU = torch.device("cpu")
BLOCKS = [5, 2, 9]
EXPERT = "model.layers.1.mlp.experts.3.down_proj"


@pytest.fixture(scope="module", params=CONFIGS)
def tool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def packed(tool: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return packed_checkpoint(tmp_path_factory.mktemp("packed"), tool)


def test_weights_are_those_that_were_packed(packed: tuple[Path, Path]) -> None:
    source, twin = packed
    expected = read_tensors(twin)
    found = {each.name: each.place for each in load_model(source, torch.float32, CPU).parameters()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_part_of_a_packed_matrix_is_read_alone(packed: tuple[Path, Path]) -> None:
    source, twin = packed
    name, rows, columns = f"{EXPERT}.weight", slice(24, 80), slice(16, 48)
    place = torch.empty(56, 32)
    with open_shards(source) as shards:
        parameter = Parameter(name, place, (128, 64), (rows, columns))
        load_weights(Reader(shards, CPU), [Part([parameter])], unused=("model.", "lm_head."))
    assert torch.equal(place, read_tensors(twin)[name][rows, columns])


def test_logits_and_tokens_are_those_of_the_twin(packed: tuple[Path, Path]) -> None:
    source, twin = packed
    oracle, prompt = load_oracle(twin), random_prompt(70)
    assert relative_error(our_logits(source, prompt, BLOCKS, [68, 1, 1]), oracle_logits(oracle, prompt)) < 1e-5
    assert_greedy(oracle, prompt[:40], generate(model_backend(source), prompt[:40], 20, BLOCKS))


def test_packed_weights_are_not_multiplied_as_they_are(packed: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="deepmesh quantize DIR --format w4a8 --out OUT, or at each start"):
        load_model(packed[0], torch.bfloat16, CPU, "quantized")


def test_packed_weights_are_quantized_again_while_they_are_loaded(tmp_path: Path) -> None:
    source, twin = packed_checkpoint(tmp_path, "compressed-tensors", hidden_size=256, moe_intermediate_size=128)
    tokens = random_prompt(50)
    found, expected = (
        our_logits(each, tokens, [3], [49, 1], dtype=torch.bfloat16, weights="w4a8") for each in (source, twin)
    )
    assert torch.equal(found, expected)


def without_scales(tensors: dict[str, torch.Tensor]) -> None:
    for kind in ("weight_scale", "scales"):
        tensors.pop(f"{EXPERT}.{kind}", None)


def with_half_the_scales(tensors: dict[str, torch.Tensor]) -> None:
    for kind in ("weight_scale", "scales"):
        if (scales := tensors.get(f"{EXPERT}.{kind}")) is not None:
            tensors[f"{EXPERT}.{kind}"] = scales[: len(scales) // 2 or 1, : scales.shape[1] // 2].contiguous()


def with_floats(tensors: dict[str, torch.Tensor]) -> None:
    for kind in ("weight_packed", "qweight"):
        if (found := tensors.get(f"{EXPERT}.{kind}")) is not None:
            tensors[f"{EXPERT}.{kind}"] = found.float()


def with_integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].int()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param(without_scales, f"the checkpoint lacks {EXPERT}", id="no scales"),
        pytest.param(with_half_the_scales, "does not fit 128 outputs and 64 inputs", id="few scales"),
        pytest.param(with_floats, "not a matrix of I32", id="floats"),
        pytest.param(with_integers, "norm.weight has dtype I32; supported are F32", id="integers elsewhere"),
    ],
)
def test_a_broken_packed_checkpoint_is_refused(
    change: Callable[[dict[str, torch.Tensor]], None], told: str, tool: str, tmp_path: Path
) -> None:
    source, _ = packed_checkpoint(tmp_path, tool)
    rewrite_as_one_file(source, change)
    with pytest.raises(CheckpointError, match=told):
        load_model(source, torch.float32, CPU)


def test_configurations_say_what_is_packed() -> None:
    found = [parse_model_config(checkpoint_config("tiny") | {"quantization_config": each}) for each in CONFIGS.values()]
    experts, everything = Quantization(experts=Stored.PACKED), Quantization(Stored.PACKED, Stored.PACKED)
    assert [config.quantization for config in found] == [experts, everything, everything]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "groups of 64": (compressed_config(group_size=64), "group_size is 64: .* groups of 32 or 128"),
    "eight bits": (compressed_config(num_bits=8), "num_bits is 8: only 4"),
    "zero points": (compressed_config(symmetric=False), "symmetric is False: only True"),
    "another format": (compressed_config() | {"format": "int-quantized"}, "supported as 'pack-quantized'"),
    "AWQ of three bits": (CONFIGS["awq"] | {"bits": 3}, "bits is 3: only 4"),
    "AWQ for gemv": (CONFIGS["awq"] | {"version": "gemv"}, "version is gemv: of AWQ's layouts only 'gemm'"),
    "reordered groups": (CONFIGS["gptq"] | {"desc_act": True}, "desc_act is true"),
    "GPTQ's second form": (CONFIGS["gptq"] | {"checkpoint_format": "gptq_v2"}, "checkpoint_format is gptq_v2"),
}


@pytest.mark.parametrize(("section", "told"), [pytest.param(*case, id=name) for name, case in REFUSED.items()])
def test_a_packing_that_is_not_read_is_refused(section: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        parse_model_config(checkpoint_config("tiny") | {"quantization_config": section})


def test_the_language_model_of_kimi_k25_is_served(tmp_path: Path) -> None:
    source, twin = packed_checkpoint(tmp_path, "compressed-tensors")
    as_kimi_k25(source)
    assert read_model_config(source).quantization == Quantization(experts=Stored.PACKED)
    tokens = random_prompt(50)
    assert relative_error(our_logits(source, tokens, [3], [49, 1]), oracle_logits(load_oracle(twin), tokens)) < 1e-5


def test_a_vision_tower_alone_is_refused(tmp_path: Path) -> None:
    source, _ = packed_checkpoint(tmp_path, "compressed-tensors")
    as_kimi_k25(source)
    only_vision(source)
    with pytest.raises(CheckpointError, match="holds a vision tower and no language model: only text is served"):
        load_model(source, torch.float32, CPU)
