"""Checkpoints that are quantized to NVFP4 layer by layer."""

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.config import read_model_config
from engine.model.quantization import LinearKind, Quantization, Stored
from engine.weights.loading import settle
from engine.weights.shards import open_shards
from mesh.errors import CheckpointError, ConfigError
from tests.support.checkpoints import generate, model_backend, random_prompt, read_tensors, tiny_checkpoint
from tests.support.cut_quantizing import cut_off_at
from tests.support.errors import relative_error
from tests.support.int4 import dequantized_tensors as source_tensors
from tests.support.nvfp4 import FEED_FORWARD, WIDE, WITH_OUTPUT, dequantized_tensors
from tests.support.oracle_model import load_oracle, oracle_logits, our_logits, write_dequantized
from tools.quantize.forms import Format, LayerSet, parse_layers
from tools.quantize.run import Options, quantize

CPU = torch.device("cpu")
BLOCKS = [5, 6, 2, 9, 1]
EXPERTS = re.compile(r"\.mlp\.experts\.")


def made(directory: Path, dtype: str = "bfloat16", **overrides: Any) -> Path:
    tiny_checkpoint(directory, dtype=dtype, **WIDE | overrides)
    return directory


def quantized(source: Path, out: Path, layers: Collection[LayerSet] | None = None) -> Path:
    quantize(Options(source, out, Format.NVFP4, CPU, layers=None if layers is None else frozenset(layers)))
    return out


@pytest.mark.parametrize(
    ("dtype", "layers", "in_nvfp4", "linear"),
    [
        ("bfloat16", None, WITH_OUTPUT, {LinearKind.FEED_FORWARD, LinearKind.OUTPUT}),
        ("float8", None, WITH_OUTPUT, {LinearKind.FEED_FORWARD, LinearKind.OUTPUT}),
        ("float8", [LayerSet.EXPERTS, LayerSet.FEED_FORWARD], FEED_FORWARD, {LinearKind.FEED_FORWARD}),
        ("bfloat16", [LayerSet.EXPERTS], EXPERTS, set()),
    ],
    ids=["all of bf16", "all of FP8", "feed-forward", "experts"],
)
def test_named_layers_become_nvfp4_and_all_others_bfloat16(
    tmp_path: Path, dtype: str, layers: list[LayerSet] | None, in_nvfp4: re.Pattern[str], linear: set[LinearKind]
) -> None:
    source = made(tmp_path / "source", dtype)
    out = quantized(source, tmp_path / "out", layers)
    exact, found, stored = source_tensors(source), dequantized_tensors(out), read_tensors(out)
    assert found.keys() == exact.keys()
    for name, weight in exact.items():
        rounded = in_nvfp4.search(name) is not None
        assert (stored[name].dtype == torch.uint8) == rounded, name
        # Normal weights lose 9.5%, and those in bfloat16 two thousandths.
        assert relative_error(found[name], weight) < (0.11 if rounded else 0.003), name
    assert stored["model.layers.1.self_attn.kv_b_proj.weight"].dtype == torch.bfloat16
    assert stored["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    with open_shards(out) as shards:
        settled = settle(read_model_config(out), shards).quantization
    assert settled == Quantization(experts=Stored.NVFP4, nvfp4=frozenset(linear))


def test_gate_and_up_share_a_global_scale(tmp_path: Path) -> None:
    source = made(tmp_path / "source")
    stored, exact = read_tensors(quantized(source, tmp_path / "out")), read_tensors(source)
    for layer in ("model.layers.0.mlp", "model.layers.1.mlp.experts.2", "model.layers.1.mlp.shared_experts"):
        gate, up, down = (f"{layer}.{matrix}_proj.weight" for matrix in ("gate", "up", "down"))
        for names in ((gate, up), (down,)):
            largest = max(float(exact[name].abs().max()) for name in names)
            for name in names:
                assert float(stored[f"{name}_scale_2"]) == pytest.approx(largest / (6 * 448))
        scales = [stored[f"{name}_scale"].float().max() for name in (gate, up)]
        assert max(scales) == 448


def test_the_rest_is_listed_by_the_names_of_its_modules(tmp_path: Path) -> None:
    out = quantized(made(tmp_path / "source"), tmp_path / "out", [LayerSet.EXPERTS])
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    assert section["quant_algo"] == "NVFP4"
    stored = read_tensors(out)
    patterns = [re.compile(re.escape(name).replace(r"\*", r"\d+")) for name in section["ignore"]]
    for name in (name for name, tensor in stored.items() if tensor.dim() == 2 and name.endswith(".weight")):
        listed = any(pattern.fullmatch(name.removesuffix(".weight")) for pattern in patterns)
        assert listed == (stored[name].dtype == torch.bfloat16), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_the_engine_serves_what_was_quantized(tmp_path: Path, dtype: str) -> None:
    out = quantized(made(tmp_path / "source", dtype, num_nextn_predict_layers=0), tmp_path / "out")
    oracle = load_oracle(write_dequantized(out, tmp_path / "float32", dequantized_tensors))
    tokens = random_prompt(70)
    exact = oracle_logits(oracle, tokens)
    assert relative_error(our_logits(out, tokens, BLOCKS, [69, 1]), exact) < 1e-5
    kept = our_logits(out, tokens, BLOCKS, [69, 1], dtype=torch.bfloat16, weights="quantized")
    # Activations are in bfloat16, and a token near a tie may choose another expert.
    assert relative_error(kept.float(), exact) < 0.12
    assert len(generate(model_backend(out, dtype="bfloat16", weights="quantized"), tokens, 5, BLOCKS)) == 5


def test_errors_are_reported_by_layer(tmp_path: Path) -> None:
    reports = quantize(Options(made(tmp_path / "source"), tmp_path / "out", Format.NVFP4, CPU))
    assert [report.name for report in reports] == ["rest", "0", "1", "2", "3"]
    assert reports[0].nvfp4_error is None
    for report in reports[1:]:
        assert report.nvfp4_error is not None and 0.08 < report.nvfp4_error < 0.11
        assert report.fp8_error is None and report.int4_error is None


def test_a_run_that_was_cut_off_keeps_its_layers(tmp_path: Path) -> None:
    source, out = made(tmp_path / "source"), tmp_path / "out"
    whole = read_tensors(quantized(source, tmp_path / "whole"))
    with cut_off_at("2"):
        quantized(source, out)
    with pytest.raises(ConfigError, match="with other settings"):
        quantized(source, out, [LayerSet.EXPERTS])
    found = read_tensors(quantized(source, out, list(LayerSet)))
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name].float(), whole[name].float()) for name in found)


def test_sets_of_layers_are_named() -> None:
    assert parse_layers("output,experts") == {LayerSet.OUTPUT, LayerSet.EXPERTS}
    for wrong, name in (("experts,attention", "'attention'"), ("", "''")):
        with pytest.raises(ConfigError, match=f"^unknown layers {name}: expected any of experts, feed-forward, output"):
            parse_layers(wrong)


def test_other_formats_have_no_sets_of_layers(tmp_path: Path) -> None:
    options = Options(tmp_path, tmp_path / "out", Format.FP8, CPU, layers=frozenset(LayerSet))
    with pytest.raises(ConfigError, match="a choice of layers is for nvfp4: fp8 is for all"):
        quantize(options)


def test_widths_that_groups_do_not_divide_are_refused(tmp_path: Path) -> None:
    source = made(tmp_path / "source", moe_intermediate_size=72)
    problem = r"experts\.0\.down_proj\.weight has 72 inputs, not a multiple of 16, the width of NVFP4 groups"
    with pytest.raises(CheckpointError, match=problem):
        quantized(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_in_nvfp4_already_is_refused(tmp_path: Path) -> None:
    out = quantized(made(tmp_path / "source"), tmp_path / "out")
    with pytest.raises(CheckpointError, match="is in NVFP4 already: quantize the model that it was made of"):
        quantized(out, tmp_path / "again")
