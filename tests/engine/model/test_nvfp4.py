"""Checkpoints in NVFP4, and plain queries that are multiplied in FP8."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.model.config import read_model_config
from engine.model.formats.nvfp4 import Nvfp4Experts, Nvfp4Linear
from engine.model.quantization import LinearKind, Quantization, Stored
from engine.weights.loading import load_model, random_model, settle
from engine.weights.shards import open_shards
from mesh.errors import CheckpointError
from tests.support.checkpoints import (
    edit_config,
    generate,
    model_backend,
    random_prompt,
    read_tensors,
    rewrite_as_one_file,
    tiny_checkpoint,
)
from tests.support.errors import relative_error
from tests.support.nvfp4 import FEED_FORWARD, WITH_OUTPUT, dequantized_tensors, nvfp4_checkpoint
from tests.support.oracle_model import load_oracle, oracle_logits, our_logits, write_dequantized

CPU = torch.device("cpu")
BLOCKS = [5, 6, 2, 9, 1]


@pytest.mark.parametrize("quantized", [FEED_FORWARD, WITH_OUTPUT], ids=["feed-forward", "with attention's output"])
def test_it_equals_its_float32_twin(tmp_path: Path, quantized: re.Pattern[str]) -> None:
    source = nvfp4_checkpoint(tmp_path / "nvfp4", quantized=quantized, num_nextn_predict_layers=0)
    oracle = load_oracle(write_dequantized(source, tmp_path / "float32", dequantized_tensors))
    tokens = random_prompt(70)
    exact = oracle_logits(oracle, tokens)
    assert relative_error(our_logits(source, tokens, BLOCKS, [69, 1]), exact) < 1e-5
    kept = our_logits(source, tokens, BLOCKS, [69, 1], dtype=torch.bfloat16, weights="quantized")
    # Activations are in bfloat16, and a token near a tie may choose another expert.
    assert relative_error(kept.float(), exact) < 0.12


def test_its_layers_keep_their_codes(tmp_path: Path) -> None:
    directory = nvfp4_checkpoint(tmp_path, quantized=WITH_OUTPUT)
    model = load_model(directory, torch.bfloat16, CPU, "quantized")
    stored = read_tensors(directory)
    kept = {each.name: each.place for each in model.parameters() if each.place.dtype == torch.uint8}
    # All layers but the MTP module's, which is not loaded.
    layers = model.config.num_hidden_layers
    assert set(kept) == {
        name
        for name, tensor in stored.items()
        if tensor.dtype == torch.uint8 and not name.startswith(f"model.layers.{layers}.")
    }
    assert all(torch.equal(place, stored[name]) for name, place in kept.items())


def test_modelopts_scales_of_kv_are_not_read(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        layers = [f"model.layers.{layer}.self_attn" for layer in range(3)]
        names = [f"{layer}.{of}" for layer in layers for of in ("k_proj.k_scale", "v_proj.v_scale")]
        names += [f"model.decoder.self_attn.attn_mqa.{of}" for of in ("k_scale", "v_scale")]
        tensors |= {name: torch.tensor(1.5) for name in names}

    directory, tokens = nvfp4_checkpoint(tmp_path, num_nextn_predict_layers=0), random_prompt(70)
    expected = our_logits(directory, tokens, BLOCKS, [69, 1])
    rewrite_as_one_file(directory, add)
    assert torch.equal(our_logits(directory, tokens, BLOCKS, [69, 1]), expected)


def test_it_generates(tmp_path: Path) -> None:
    directory = nvfp4_checkpoint(tmp_path, num_nextn_predict_layers=0)
    backend = model_backend(directory, dtype="bfloat16", weights="quantized")
    assert len(generate(backend, random_prompt(70), 5, BLOCKS)) == 5


def test_an_mtp_module_may_be_plain(tmp_path: Path) -> None:
    def in_module(name: str) -> bool:
        return name.startswith("model.layers.3.")

    directory = nvfp4_checkpoint(tmp_path, keep=in_module, num_hidden_layers=3, num_nextn_predict_layers=1)
    model = load_model(directory, torch.bfloat16, CPU, "quantized", drafts=True)
    assert model.config.draft_quantization == Quantization()
    assert any(each.place.dtype == torch.uint8 for each in model.layers[2].parameters("2"))
    (module,) = model.mtp
    assert all(each.place.dtype != torch.uint8 for each in module.parameters("3"))


@pytest.mark.parametrize("method", ["modelopt", "modelopt_fp4"])
def test_tensors_say_what_is_in_nvfp4(method: str, tmp_path: Path) -> None:
    directory = nvfp4_checkpoint(tmp_path, quantized=WITH_OUTPUT)
    edit_config(directory, quantization_config={"quant_method": method, "quant_algo": "NVFP4"})
    with open_shards(directory) as shards:
        found = settle(read_model_config(directory), shards).quantization
    assert found == Quantization(experts=Stored.NVFP4, nvfp4=frozenset({LinearKind.OUTPUT, LinearKind.FEED_FORWARD}))


def _drop(pattern: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if re.search(pattern, name)]:
            del tensors[name]

    return change


def _narrow(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.experts.0.up_proj.weight_scale"
    tensors[name] = tensors[name][:, :-1].contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop(r"layers\.1\.mlp\.experts\.0\.up_proj\.weight_scale$"), "lacks"),
        (_drop(r"layers\.1\.mlp\.experts\.0\.up_proj\.weight_scale_2$"), "lacks"),
        (_narrow, "config.json makes it|groups of 16 inputs make it"),
    ],
)
@pytest.mark.parametrize("weights", ["quantized", "dequantized"])
def test_missing_and_wrong_scales_are_named(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str, weights: str
) -> None:
    directory = nvfp4_checkpoint(tmp_path, num_hidden_layers=2, num_nextn_predict_layers=0)
    rewrite_as_one_file(directory, change)
    with pytest.raises(CheckpointError, match=message):
        load_model(directory, torch.bfloat16, CPU, "quantized" if weights == "quantized" else "dequantized")


def test_layers_of_a_kind_must_be_alike(tmp_path: Path) -> None:
    def first(name: str) -> bool:
        return name == "model.layers.1.mlp.experts.0.up_proj.weight"

    directory = nvfp4_checkpoint(tmp_path, keep=first, num_hidden_layers=2, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"experts\.0\.up_proj\.weight is not"):
        load_model(directory, torch.bfloat16, CPU, "quantized")


def test_random_nvfp4_weights_keep_magnitudes(tmp_path: Path) -> None:
    directory = nvfp4_checkpoint(tmp_path, num_hidden_layers=2, num_nextn_predict_layers=0)
    model = random_model(directory, torch.bfloat16, CPU, "quantized")
    feed_forward = model.layers[0].feed_forward
    assert isinstance(vars(feed_forward)["_gate_up"], Nvfp4Linear)
    assert isinstance(vars(model.layers[1].feed_forward)["experts"], Nvfp4Experts)
    out = vars(feed_forward)["_gate_up"].forward(torch.randn(64, 128).bfloat16(), None)
    assert 0.5 < float(out.float().std()) < 2


def test_queries_may_be_multiplied_in_fp8(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "q_lora_rank": 128, "num_nextn_predict_layers": 0}
    directory = tiny_checkpoint(tmp_path, dtype="bfloat16", **wide)
    exact = load_model(directory, torch.bfloat16, CPU, "quantized")
    rounded = load_model(directory, torch.bfloat16, CPU, "quantized", fp8_queries=True)
    x = torch.randn(9, 128).bfloat16()
    names = [type(vars(model.layers[0].attention)["_query"]).__name__ for model in (exact, rounded)]
    assert names == ["PlainLinear", "Fp8AtLoadLinear"]
    backend = model_backend(directory, dtype="bfloat16", weights="quantized", query_weights="fp8")
    assert len(generate(backend, random_prompt(70), 5, BLOCKS)) == 5
    from kernels.act_quant import quantize

    plain = vars(exact.layers[0].attention)["_query"].forward(x, None)
    fp8 = vars(rounded.layers[0].attention)["_query"].forward(quantize(x), None)
    error = relative_error(fp8.float(), plain.float())
    assert 0.005 < error < 0.06
