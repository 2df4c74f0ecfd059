"""Checkpoints that are quantized layer by layer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.config import read_model_config
from engine.model.quantization import Quantization, Stored
from mesh.errors import CheckpointError, ConfigError
from tests.support.checkpoints import edit_config, random_prompt, read_tensors, rewrite_as_one_file, tiny_checkpoint
from tests.support.cut_quantizing import cut_off_at
from tests.support.errors import relative_error
from tests.support.family import FAMILY
from tests.support.int4 import WIDE, dequantized_tensors
from tests.support.oracle_model import load_oracle, oracle_logits, our_logits, write_dequantized
from tools.quantize.forms import Format
from tools.quantize.run import Options, quantize

CPU = torch.device("cpu")
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"

SCALES = "model.layers.0.self_attn.o_proj.weight_scale_inv"
E8M0 = torch.float8_e8m0fnu


def made(directory: Path, dtype: str = "bfloat16", **overrides: Any) -> Path:
    tiny_checkpoint(directory, dtype=dtype, **WIDE | overrides)
    return directory


def quantized(source: Path, out: Path, form: Format = Format.W4A8) -> Path:
    quantize(Options(source, out, form, CPU))
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8"])
def test_experts_become_int4_and_all_other_linear_weights_fp8(tmp_path: Path, dtype: str) -> None:
    source = made(tmp_path / "source", dtype)
    out = quantized(source, tmp_path / "out")
    exact, found, stored = dequantized_tensors(source), dequantized_tensors(out), read_tensors(out)
    assert found.keys() == exact.keys()
    for name, weight in exact.items():
        bound = 0.14 if ".mlp.experts." in name else 0.05
        assert relative_error(found[name], weight) < bound, name
    assert stored[EXPERT].dtype == torch.int8
    assert stored["model.layers.3.mlp.experts.0.up_proj.weight"].dtype == torch.int8, "an MTP module's experts too"
    assert stored["model.layers.1.mlp.shared_experts.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert stored["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    assert stored["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert read_model_config(out).quantization == Quantization(Stored.FP8, Stored.INT4, static_inputs=True)


def test_indexers_are_quantized_with_what_is_linear(tmp_path: Path) -> None:
    # The indexer's key is whole blocks.
    source = made(tmp_path / "source", "float32", **{**FAMILY["deepseek-v3.2"], "index_head_dim": 128})
    out = quantized(source, tmp_path / "out")
    exact, found, stored = dequantized_tensors(source), dequantized_tensors(out), read_tensors(out)
    for name in (f"model.layers.1.self_attn.indexer.{matrix}.weight" for matrix in ("wq_b", "wk")):
        assert stored[name].dtype == torch.float8_e4m3fn and relative_error(found[name], exact[name]) < 0.05
    kept = our_logits(out, random_prompt(90), [1, 0], [90], dtype=torch.bfloat16, weights="quantized")
    assert kept.isfinite().all()


def test_activations_that_are_scaled_by_powers_stay_so(tmp_path: Path) -> None:
    source = made(tmp_path / "source", "float8")
    section = json.loads((source / "config.json").read_text())["quantization_config"]
    edit_config(source, quantization_config=section | {"scale_fmt": "ue8m0"})
    assert read_model_config(quantized(source, tmp_path / "out")).quantization.power_scales


def test_weights_that_are_fp8_already_stay_bit_by_bit(tmp_path: Path) -> None:
    source = made(tmp_path / "source", "float8")
    before, after = read_tensors(source), read_tensors(quantized(source, tmp_path / "out"))
    for name in before:
        if ".mlp.experts." not in name:
            assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name


def test_scales_in_e8m0_stay_as_they_are(tmp_path: Path) -> None:
    def in_e8m0(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({n: t.log2().ceil().exp2().to(E8M0) for n, t in tensors.items() if n.endswith("_scale_inv")})

    rewrite_as_one_file(made(tmp_path / "source", "float8"), in_e8m0)
    before, after = read_tensors(tmp_path / "source"), read_tensors(quantized(tmp_path / "source", tmp_path / "out"))
    assert after[SCALES].dtype == E8M0 and torch.equal(after[SCALES].float(), before[SCALES].float())


def test_the_engine_serves_what_was_quantized(tmp_path: Path) -> None:
    out = quantized(made(tmp_path / "source", num_nextn_predict_layers=0), tmp_path / "out")
    oracle = load_oracle(write_dequantized(out, tmp_path / "dequantized"))
    tokens = random_prompt(50)
    assert relative_error(our_logits(out, tokens, [3], [49, 1]), oracle_logits(oracle, tokens)) < 1e-5


def test_fp8_is_made_of_bfloat16(tmp_path: Path) -> None:
    source = made(tmp_path / "source")
    out = quantized(source, tmp_path / "out", Format.FP8)
    assert read_model_config(out).quantization == Quantization(Stored.FP8, Stored.FP8)
    exact, found = dequantized_tensors(source), dequantized_tensors(out)
    assert all(relative_error(found[name], exact[name]) < 0.05 for name in exact)
    assert read_tensors(out)[EXPERT].dtype == torch.float8_e4m3fn


def test_everything_beside_the_weights_is_copied(tmp_path: Path) -> None:
    source = made(tmp_path / "source")
    (source / "modeling.py").write_text("# anything\n")
    out = quantized(source, tmp_path / "out")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "modeling.py"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    kept = json.loads((out / "config.json").read_text())
    del kept["quantization_config"]
    assert kept == json.loads((source / "config.json").read_text())


def test_errors_are_reported_by_layer(tmp_path: Path) -> None:
    reports = quantize(Options(made(tmp_path / "source"), tmp_path / "out", Format.W4A8, CPU))
    assert [report.name for report in reports] == ["rest", "0", "1", "2", "3"]
    assert reports[0].int4_error is None and reports[0].fp8_error is None
    assert reports[1].int4_error is None and reports[1].fp8_error is not None
    assert all(report.int4_error is not None and 0.05 < report.int4_error < 0.15 for report in reports[2:])
    assert json.loads((tmp_path / "out" / "quantization_report.json").read_text())[2]["name"] == "1"


def test_a_run_that_was_cut_off_continues(tmp_path: Path) -> None:
    source, out = made(tmp_path / "source"), tmp_path / "out"
    whole = read_tensors(quantized(source, tmp_path / "whole"))
    with cut_off_at("2"):
        quantized(source, out)
    assert not (out / "config.json").exists()
    early = {path: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    found = read_tensors(quantized(source, out))
    assert len(early) == 3 and all(path.stat().st_mtime_ns == time for path, time in early.items())
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in found)


def without_expert(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[EXPERT]


def of_another_model(tensors: dict[str, torch.Tensor]) -> None:
    tensors[EXPERT] = torch.zeros(256, 256).bfloat16()


def with_more(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without_expert, rf"source lacks {EXPERT}"),
        (of_another_model, r"down_proj.weight in .* has shape \[256, 256\]; config.json makes it \[256, 128\]"),
        (with_more, r"does not describe: model.layers.9.mlp.up_proj.weight"),
    ],
)
def test_an_incomplete_source_is_refused_before_writing(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], problem: str
) -> None:
    rewrite_as_one_file(made(tmp_path / "source"), change)
    with pytest.raises(CheckpointError, match=problem):
        quantized(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_modules_that_a_source_does_not_count_are_left_out(tmp_path: Path) -> None:
    source = made(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    module = f"model.layers.{config['num_hidden_layers']}."
    assert any(name.startswith(module) for name in read_tensors(source))
    assert not any(name.startswith(module) for name in read_tensors(quantized(source, tmp_path / "out")))


def test_an_fp8_source_without_scales_is_refused(tmp_path: Path) -> None:
    rewrite_as_one_file(made(tmp_path / "source", "float8"), lambda tensors: tensors.pop(f"{EXPERT}_scale_inv"))
    with pytest.raises(CheckpointError, match=rf"lacks {EXPERT}_scale_inv"):
        quantized(tmp_path / "source", tmp_path / "out")


def test_widths_that_groups_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="moe_intermediate_size 64 is not a multiple of 128"):
        quantized(made(tmp_path / "source", moe_intermediate_size=64), tmp_path / "out")


def test_what_is_quantized_already_is_refused(tmp_path: Path) -> None:
    int4, fp8 = made(tmp_path / "int4", "w4a8"), made(tmp_path / "fp8", "float8")
    with pytest.raises(CheckpointError, match="has INT4 experts already"):
        quantized(int4, tmp_path / "out")
    with pytest.raises(CheckpointError, match="is in FP8 already"):
        quantized(fp8, tmp_path / "out", Format.FP8)


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    source = made(tmp_path / "source")
    other = made(tmp_path / "other")
    with pytest.raises(ConfigError, match="made of another model or with other settings"):
        quantized(source, other)
    rewrite_as_one_file(other)
    with pytest.raises(ConfigError, match="holds another checkpoint"):
        quantized(source, other)
    out = quantized(source, tmp_path / "out")
    edit_config(source, routed_scaling_factor=2.0)
    with pytest.raises(ConfigError, match="of another model or with other settings"):
        quantized(source, out)
