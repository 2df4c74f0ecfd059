"""INT4 experts against the float32 model that their checkpoint stands for."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.exchange.alone import Alone
from engine.model.activations import Normalized
from engine.model.allocator import Allocator
from engine.model.config import read_model_config
from engine.model.expert_group import ExpertGroup
from engine.model.formats.choice import choose_formats
from engine.model.formats.interface import Experts, ExpertShape
from engine.model.formats.plain import PlainExperts
from engine.model.formats.w4a8 import W4A8Experts
from engine.model.moe import MixtureOfExperts
from engine.model.parameters import Part
from engine.model.quantization import KeptWeights, Quantization, Stored
from engine.weights.checkpoint import load_weights
from engine.weights.loading import load_model, make_allocator, random_model, settle
from engine.weights.reader import Reader
from engine.weights.shards import open_shards
from mesh.errors import CheckpointError
from tests.support.checkpoints import edit_config, generate, model_backend, random_prompt, rewrite_as_one_file
from tests.support.errors import relative_error
from tests.support.int4 import dequantized_tensors, int4_checkpoint
from tests.support.oracle_model import load_oracle, oracle_logits, our_logits, write_dequantized

CPU = torch.device("cpu")
BLOCKS = [5, 6, 2, 9, 1]
SCALES = [
    pytest.param({}, id="rounded"),
    pytest.param({"static": True}, id="static"),
    pytest.param({"static": True, "pre_scaled": True}, id="static, AWQ"),
    pytest.param({"pre_scaled": True}, id="AWQ"),
]


@pytest.mark.parametrize("scales", SCALES)
def test_dequantized_it_equals_its_float32_twin(tmp_path: Path, scales: dict[str, bool]) -> None:
    source = int4_checkpoint(tmp_path / "int4", **scales)
    oracle = load_oracle(write_dequantized(source, tmp_path / "dequantized"))
    tokens = random_prompt(70)
    assert relative_error(our_logits(source, tokens, BLOCKS, [69, 1]), oracle_logits(oracle, tokens)) < 1e-5


def experts_of(directory: Path) -> Experts:
    """The experts of the first layer that has some."""
    config = read_model_config(directory)
    with open_shards(directory) as shards:
        config = settle(config, shards)
        shape = ExpertShape(config.n_routed_experts, 0, config.hidden_size, config.moe_intermediate_size)
        experts = make_allocator(config, torch.bfloat16, CPU, "quantized").experts(shape)
        part = Part(list(experts.parameters("model.layers.1.mlp")), lambda: experts.finish(ExpertGroup(Alone())))
        load_weights(Reader(shards, CPU), [part], unused=("model.", "lm_head."))
    return experts


def outputs_of(experts: Experts, hidden: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """[tokens, chosen, hidden]"""
    rows, positions = experts.forward(hidden.bfloat16(), choices)
    return rows.flatten(0, -2)[positions]


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("tokens", [0, 1, 5, 300])
def test_its_experts_differ_from_exact_ones_by_their_inputs_rounding(
    tmp_path: Path, tokens: int, scales: dict[str, bool]
) -> None:
    directory = int4_checkpoint(tmp_path, num_hidden_layers=2, **scales)
    weights, hidden = dequantized_tensors(directory), torch.randn(tokens, 256)
    choices = torch.stack([torch.randperm(8)[:2] for _ in range(tokens)]) if tokens else torch.empty(0, 2).long()
    found = outputs_of(experts_of(directory), hidden, choices)
    expected = torch.zeros(tokens, 2, 256)
    for token, chosen in enumerate(choices.tolist()):
        for index, expert in enumerate(chosen):
            gate, up, down = (
                weights[f"model.layers.1.mlp.experts.{expert}.{kind}_proj.weight"] for kind in ("gate", "up", "down")
            )
            inner = torch.nn.functional.silu(gate @ hidden[token]) * (up @ hidden[token])
            expected[token, index] = down @ inner
    # There are two roundings to e4m3, each with an error of up to a sixteenth.
    assert relative_error(found, expected) < 0.1


def test_experts_stay_in_int4_and_other_layers_in_fp8(tmp_path: Path) -> None:
    directory = int4_checkpoint(tmp_path, static=True)
    places = {each.name: each.place for each in load_model(directory, torch.bfloat16, CPU, "quantized").parameters()}
    assert places["model.layers.1.mlp.experts.3.up_proj.weight"].dtype == torch.int8
    assert places["model.layers.1.mlp.shared_experts.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert places["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert places["model.layers.1.self_attn.o_proj.weight"].dtype == torch.float8_e4m3fn


def test_kept_in_int4_a_model_is_near_its_dequantized_self(tmp_path: Path) -> None:
    # Every expert is chosen, because a different choice would change more than rounding does.
    all_chosen = {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
    directory, prompt = int4_checkpoint(tmp_path, static=True, pre_scaled=True, **all_chosen), random_prompt(80)
    exact = our_logits(directory, prompt, BLOCKS, [79, 1])
    kept = our_logits(directory, prompt, BLOCKS, [79, 1], dtype=torch.bfloat16, weights="quantized")
    assert relative_error(kept.float(), exact) < 0.15
    backend = model_backend(directory, dtype="bfloat16", weights="quantized")
    assert len(generate(backend, prompt, 5, BLOCKS)) == 5


def test_the_larger_scale_of_gate_and_up_quantizes_a_token(tmp_path: Path) -> None:
    directory = int4_checkpoint(tmp_path, static=True, num_hidden_layers=2)
    hidden, choices = torch.randn(4, 256), torch.arange(8).view(4, 2)
    before = outputs_of(experts_of(directory), hidden, choices)
    scale = torch.tensor([5.0])
    name = "model.layers.1.mlp.experts.{}.w{}.input_scale"
    rewrite_as_one_file(directory, lambda tensors: tensors.update({name.format(3, 3): scale}))
    one = outputs_of(experts_of(directory), hidden, choices)
    everywhere = {name.format(expert, matrix): scale.clone() for expert in range(8) for matrix in (1, 3)}
    rewrite_as_one_file(directory, lambda tensors: tensors.update(everywhere))
    assert not torch.equal(one, before)
    assert torch.equal(one, outputs_of(experts_of(directory), hidden, choices))


def test_scales_may_be_stored_without_a_dimension(tmp_path: Path) -> None:
    directory = int4_checkpoint(tmp_path, static=True, num_hidden_layers=2)
    hidden, choices = torch.randn(4, 256), torch.arange(8).view(4, 2)
    before = outputs_of(experts_of(directory), hidden, choices)

    def drop_dimension(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("input_scale")]:
            tensors[name] = tensors[name].squeeze()

    rewrite_as_one_file(directory, drop_dimension)
    assert torch.equal(outputs_of(experts_of(directory), hidden, choices), before)


def test_widths_that_groups_do_not_take_are_dequantized() -> None:
    formats = choose_formats(Quantization(Stored.FP8, Stored.INT4), torch.bfloat16, dequantize=False)
    allocate = Allocator(torch.bfloat16, CPU, formats)
    assert isinstance(allocate.experts(ExpertShape(8, 0, 256, 128)), W4A8Experts)
    assert isinstance(allocate.experts(ExpertShape(8, 0, 256, 64)), PlainExperts)


def test_random_experts_keep_the_magnitude_of_what_they_multiply(tmp_path: Path) -> None:
    model = random_model(int4_checkpoint(tmp_path), torch.bfloat16, CPU, "quantized")
    mixture = model.layers[1].feed_forward
    assert isinstance(mixture, MixtureOfExperts)
    found = mixture.routed(Normalized(torch.randn(64, 256).bfloat16(), None))
    assert 0.1 < float(found.rows.flatten(0, -2)[found.positions].float().std()) < 2


ERRORS = [
    ({"group_size": 64}, r"group_size is 64: INT4 weights come in groups of 128"),
    ({"quant_method": "hqq"}, r"quantization 'hqq' is not supported: expected 'fp8', 'w4afp8', 'modelopt' with"),
    ({"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]"),
]


@pytest.mark.parametrize(("changes", "problem"), ERRORS)
def test_configurations_that_are_not_served_are_named(tmp_path: Path, changes: dict[str, object], problem: str) -> None:
    directory = int4_checkpoint(tmp_path, num_hidden_layers=2)
    section = json.loads((directory / "config.json").read_text())["quantization_config"] | changes
    edit_config(directory, quantization_config=section)
    with pytest.raises(CheckpointError, match=problem):
        read_model_config(directory)


UP = "model.layers.1.mlp.experts.3.up_proj.weight"


def narrow_groups(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{UP}_scale_inv"] = torch.ones(128, 4)


def widen(tensors: dict[str, torch.Tensor]) -> None:
    tensors[UP] = torch.zeros(128, 256).bfloat16()
    del tensors[f"{UP}_scale_inv"]


def shorten(tensors: dict[str, torch.Tensor]) -> None:
    tensors[UP] = tensors[UP][:64].contiguous()


@pytest.mark.parametrize("weights", ["quantized", "dequantized"])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (narrow_groups, r"up_proj.weight_scale_inv in .* \[128, 4\]; groups of 128 inputs make it \[128, 2\]"),
        (lambda tensors: tensors.pop(f"{UP}_scale_inv"), r"lacks model.*up_proj.weight_scale_inv"),
        (shorten, r"up_proj.weight in .* has shape \[64, .* config\.json makes it \[128, "),
    ],
)
def test_weights_that_do_not_fit_are_named(
    tmp_path: Path, weights: KeptWeights, change: Callable[[dict[str, torch.Tensor]], None], problem: str
) -> None:
    rewrite_as_one_file(int4_checkpoint(tmp_path, num_hidden_layers=2), change)
    with pytest.raises(CheckpointError, match=problem):
        load_model(tmp_path, torch.bfloat16, CPU, weights)


def test_a_bf16_expert_among_int4_ones_is_named(tmp_path: Path) -> None:
    rewrite_as_one_file(int4_checkpoint(tmp_path, num_hidden_layers=2), widen)
    with pytest.raises(CheckpointError, match=r"lacks .*up_proj.weight_scale_inv"):
        load_model(tmp_path, torch.bfloat16, CPU, "quantized")


def mixed_precision(directory: Path, **changes: dict[str, object]) -> Path:
    """Replaces `quantization_config` by TensorRT-LLM's files."""
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "MIXED_PRECISION"}}')
    blocks = {"quant_algo": "FP8_BLOCK_SCALES"}
    layers = {"model.layers.1.mlp.experts": {"quant_algo": "W4A8_AWQ"}, "model.layers.1.self_attn.o_proj": blocks}
    (directory / "quant_cfg.json").write_text(json.dumps({"quantized_layers": layers | changes}))
    return directory


def test_the_files_of_tensorrt_llm_say_the_same(tmp_path: Path) -> None:
    directory = int4_checkpoint(tmp_path, static=True, num_hidden_layers=2)
    expected = our_logits(directory, random_prompt(20), BLOCKS, [20])
    assert torch.equal(our_logits(mixed_precision(directory), random_prompt(20), BLOCKS, [20]), expected)
    assert read_model_config(directory).quantization == Quantization(Stored.FP8, Stored.INT4, static_inputs=True)


@pytest.mark.parametrize(
    ("name", "layer", "problem"),
    [
        ("model.layers.1.mlp.experts", {"quant_algo": "NVFP4"}, "has quant_algo 'NVFP4': only 'W4A8_AWQ' is supported"),
        ("model.layers.1.self_attn.o_proj", {"quant_algo": "FP8"}, "only 'FP8_BLOCK_SCALES' is supported there"),
        ("model.layers.1.mlp.experts", {"quant_algo": "W4A8_AWQ", "group_size": 64}, "groups of 128"),
    ],
)
def test_other_algorithms_of_tensorrt_llm_are_named(
    tmp_path: Path, name: str, layer: dict[str, object], problem: str
) -> None:
    directory = mixed_precision(int4_checkpoint(tmp_path, num_hidden_layers=2), **{name: layer})
    with pytest.raises(CheckpointError, match=problem):
        read_model_config(directory)
