"""INT4 checkpoints that other tools packed, against the float32 models that they stand for."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.activations import InputForm
from engine.model.config import parse_model_config, read_model_config
from engine.model.formats.w4a8 import W4A8Experts
from engine.model.moe import MixtureOfExperts
from engine.model.parameters import Parameter, Part
from engine.model.quantization import KeptWeights, LinearKind, Quantization, Stored
from engine.weights.checkpoint import load_weights
from engine.weights.loading import load_model, make_allocator
from engine.weights.reader import Reader
from engine.weights.shards import open_shards
from kernels.w4a8_gemm import gate_and_up
from kernels.w4a8_gemm.reference import dequantize
from mesh.errors import CheckpointError, ConfigError
from tests.support.checkpoints import generate, model_backend, random_prompt, read_tensors, rewrite_as_one_file
from tests.support.int4 import WIDE, unpacked
from tests.support.oracle_model import assert_greedy, load_oracle, oracle_logits, our_logits, relative_error
from tests.support.packed import CONFIGS, as_kimi_k25, compressed_config, packed_checkpoint
from tools.make_checkpoint import checkpoint_config

CPU = torch.device("cpu")
BLOCKS = [5, 2, 9]
GROUPS_OF_32 = Quantization(experts=Stored.INT4, group=32, compressed=True)
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


@pytest.mark.parametrize("tool", ["awq", "gptq"], indirect=True)
def test_weights_with_zero_points_are_not_multiplied(packed: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="deepmesh quantize DIR --format w4a8 --out OUT, or at each start"):
        load_model(packed[0], torch.bfloat16, CPU, "quantized")


def test_packed_weights_are_quantized_again_while_they_are_loaded(tmp_path: Path) -> None:
    source, twin = packed_checkpoint(tmp_path, "awq", **WIDE)
    tokens = random_prompt(50)
    found, expected = (
        our_logits(each, tokens, [3], [49, 1], dtype=torch.bfloat16, weights="w4a8") for each in (source, twin)
    )
    assert torch.equal(found, expected)


def dequantized_experts(source: Path, weights: KeptWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """The experts of the first layer that has some, as they are kept in tiles: names and what these stand for."""
    model = load_model(source, torch.bfloat16, CPU, weights)
    layer = model.layers[1].feed_forward
    assert isinstance(layer, MixtureOfExperts) and isinstance(layer.experts, W4A8Experts)
    for number, (gate_up, down) in enumerate(zip(*layer.experts.weights(), strict=True)):
        gate, up = gate_and_up(dequantize(gate_up).t())
        for kind, matrix in (("gate", gate.t()), ("up", up.t()), ("down", dequantize(down))):
            yield f"model.layers.1.mlp.experts.{number}.{kind}_proj.weight", matrix


@pytest.mark.parametrize("weights", ["quantized", "w4a8"])
@pytest.mark.parametrize("group", [32, 128])
def test_groups_are_kept_as_published(group: int, weights: KeptWeights, tmp_path: Path) -> None:
    source, twin = packed_checkpoint(tmp_path, "compressed-tensors", group=group, **WIDE)
    expected = read_tensors(twin)
    assert all(torch.equal(found, expected[name]) for name, found in dequantized_experts(source, weights))


@pytest.mark.parametrize(("weights", "form"), [("quantized", InputForm.PLAIN), ("w4a8", InputForm.FP8_GROUPS)])
def test_linear_layers_next_to_them_are_rounded_only_if_asked(weights: KeptWeights, form: InputForm) -> None:
    config = parse_model_config(checkpoint_config("tiny") | {"quantization_config": CONFIGS["compressed-tensors"]})
    allocate = make_allocator(config, torch.bfloat16, CPU, weights)
    assert allocate.linear(LinearKind.OUTPUT, 256, (256,)).input_form is form


def test_a_model_in_groups_of_32_is_near_its_twin(tmp_path: Path) -> None:
    # Every expert is chosen, because a different choice would change more than rounding does.
    all_chosen = {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
    source, twin = packed_checkpoint(tmp_path, "compressed-tensors", **WIDE, **all_chosen)
    prompt = random_prompt(80)
    kept = our_logits(source, prompt, BLOCKS, [78, 1, 1], dtype=torch.bfloat16, weights="quantized")
    assert relative_error(kept.float(), oracle_logits(load_oracle(twin), prompt)) < 0.15
    backend = model_backend(source, dtype="bfloat16", weights="quantized")
    assert len(generate(backend, prompt, 5, BLOCKS)) == 5


def test_a_part_of_a_kept_matrix_is_read_alone(tmp_path: Path) -> None:
    source, twin = packed_checkpoint(tmp_path, "compressed-tensors", **WIDE)
    name, rows, columns = f"{EXPERT}.weight", slice(24, 80), slice(16, 48)
    place, scales = torch.empty(56, 32, dtype=torch.int8), torch.empty(56, 2)
    with open_shards(source) as shards:
        parameter = Parameter(name, place, (256, 64), (rows, columns))
        of_scales = Parameter(f"{EXPERT}.weight_scale", scales, (256, 4), (rows, slice(1, 3)))
        load_weights(Reader(shards, CPU), [Part([parameter, of_scales])], unused=("model.", "lm_head."))
    assert torch.equal(unpacked(place) * scales.repeat_interleave(32, 1), read_tensors(twin)[name][rows, 32:96])


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
    everything = Quantization(Stored.PACKED, Stored.PACKED)
    assert [config.quantization for config in found] == [GROUPS_OF_32, everything, everything]


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
    assert read_model_config(source).quantization == GROUPS_OF_32
    tokens = random_prompt(50)
    assert relative_error(our_logits(source, tokens, [3], [49, 1]), oracle_logits(load_oracle(twin), tokens)) < 1e-5
