"""INT4 experts whose scales come from calibration texts, with AWQ and without."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from engine.model.config import read_model_config
from engine.weights.loading import settle
from engine.weights.shards import open_shards
from mesh.errors import ConfigError
from tests.support.checkpoints import random_prompt, read_tensors, rewrite_as_one_file, tiny_checkpoint
from tests.support.cut_quantizing import cut_off_at
from tests.support.errors import relative_error
from tests.support.family import FAMILY
from tests.support.int4 import WIDE
from tests.support.oracle_model import load_oracle_of_family, oracle_logits, our_logits
from tools.quantize import output
from tools.quantize.awq import best_pre_scale, output_errors
from tools.quantize.calibration import Calibration, read_calibration
from tools.quantize.experts import quantize_experts
from tools.quantize.forms import Format
from tools.quantize.layer_pass import LayerPass, Routed
from tools.quantize.run import Options, quantize
from tools.quantize.source import Source

CPU = torch.device("cpu")
TEXTS = Calibration(tuple(tuple(random_prompt(length, seed=length)) for length in (100, 30, 65, 2)))
LAYER = "model.layers.1.mlp.experts"


def made(directory: Path, **overrides: Any) -> Path:
    tiny_checkpoint(directory, dtype="bfloat16", **WIDE | overrides)
    return directory


def with_loud_channels(directory: Path) -> Path:
    """The experts' inputs have channels that are far larger than the others, as those of large models do."""

    def amplify(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("post_attention_layernorm.weight"):
                tensor[::16] *= 30

    rewrite_as_one_file(directory, amplify)
    return directory


def calibrated(source: Path, out: Path, *, awq: bool, texts: Calibration = TEXTS) -> list[output.UnitReport]:
    return quantize(Options(source, out, Format.W4A8, CPU, calibration=texts, awq=awq))


@pytest.mark.parametrize("model", [{}, FAMILY["glm-5"]], ids=["V3", "GLM-5"])
def test_texts_pass_through_the_layers_as_through_the_model(tmp_path: Path, model: dict[str, Any]) -> None:
    directory = made(tmp_path, **{**model, "num_nextn_predict_layers": 0})
    tensors = read_tensors(directory)
    with open_shards(directory) as shards:
        source = Source(directory, shards, CPU)
        layer_pass = LayerPass(source, TEXTS, tmp_path / "state")

        def compute(routed: Routed) -> torch.Tensor:
            return quantize_experts(source, f"model.layers.{layer_pass.next_layer}.mlp", routed, awq=False).added

        for _ in range(3):
            layer_pass.run_layer(compute)
        hidden = layer_pass.hidden()
    oracle, start = load_oracle_of_family(directory), 0
    for sequence in TEXTS.sequences:
        logits = hidden[start : start + len(sequence)] @ tensors["lm_head.weight"].float().t()
        assert relative_error(logits, oracle_logits(oracle, sequence)) < 1e-4
        start += len(sequence)


@pytest.mark.parametrize("awq", [False, True])
def test_the_engine_serves_what_was_calibrated(tmp_path: Path, awq: bool) -> None:
    # Every expert is chosen: a choice that falls otherwise changes more than rounding does.
    all_chosen = {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
    source = made(tmp_path / "source", **all_chosen)
    calibrated(source, tmp_path / "out", awq=awq)
    with open_shards(tmp_path / "out") as shards:
        stored = settle(read_model_config(tmp_path / "out"), shards).quantization
    assert (stored.static_inputs, stored.pre_scaled) == (True, awq)
    prompt = random_prompt(70, seed=7)
    exact = our_logits(source, prompt, [3, 4], [69, 1])
    kept = our_logits(tmp_path / "out", prompt, [3, 4], [69, 1], dtype=torch.bfloat16, weights="quantized")
    assert relative_error(kept.float(), exact) < 0.3


def test_a_layers_experts_share_the_scales_of_their_tokens(tmp_path: Path) -> None:
    calibrated(made(tmp_path / "source"), tmp_path / "out", awq=True)
    tensors = read_tensors(tmp_path / "out")
    inputs = {float(tensors[f"{LAYER}.{expert}.w{matrix}.input_scale"]) for expert in range(8) for matrix in (1, 3)}
    assert len(inputs) == 1
    assert tensors[f"{LAYER}.pre_quant_scale"].shape == (256,)
    assert tensors[f"{LAYER}.5.down_proj.pre_quant_scale"].shape == (128,)
    assert "model.layers.3.mlp.experts.2.w2.input_scale" in tensors, "an MTP module's experts too"


def test_awq_lowers_the_error_of_outputs_where_channels_differ(tmp_path: Path) -> None:
    source = with_loud_channels(made(tmp_path / "source"))
    plain = calibrated(source, tmp_path / "plain", awq=False)
    searched = calibrated(source, tmp_path / "awq", awq=True)
    for rounded, better in zip(plain[2:], searched[2:], strict=True):
        assert rounded.output_error is not None and better.output_error is not None
        assert better.output_error < 0.8 * rounded.output_error


def test_experts_that_no_text_reaches_are_rounded(tmp_path: Path) -> None:
    calibrated(made(tmp_path / "source"), tmp_path / "out", awq=True, texts=Calibration(((5, 9),)))
    tensors = read_tensors(tmp_path / "out")
    unreached = [
        expert for expert in range(8) if bool((tensors[f"{LAYER}.{expert}.down_proj.pre_quant_scale"] == 1).all())
    ]
    assert len(unreached) >= 4
    scales = torch.cat([tensors[f"{LAYER}.{expert}.w2.input_scale"] for expert in range(8)])
    assert bool((scales[unreached] == scales.max()).all()) and float(scales.min()) > 0


def test_a_calibrated_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    source, kept, begun_again = made(tmp_path / "source"), tmp_path / "kept", tmp_path / "begun again"
    calibrated(source, tmp_path / "whole", awq=True)
    whole = read_tensors(tmp_path / "whole")
    with cut_off_at("2"):
        calibrated(source, kept, awq=True)
    copytree(kept, begun_again)
    (state,) = begun_again.glob("calibration_state*")
    state.unlink()
    for out in (kept, begun_again):
        calibrated(source, out, awq=True)
        found = read_tensors(out)
        assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in found)
        assert not list(out.glob("calibration_state*"))


def test_a_search_never_chooses_worse_than_rounding() -> None:
    rows, weight = torch.randn(50, 256) * torch.rand(256).pow(4), torch.randn(64, 256)
    found = best_pre_scale(rows.abs().mean(0), [(rows, weight)])
    searched, plain = output_errors(rows, weight, [found, torch.ones(256)])
    assert searched < 0.8 * plain


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="AWQ needs calibration"):
        quantize(Options(tmp_path, tmp_path / "out", Format.W4A8, CPU, awq=True))
    with pytest.raises(ConfigError, match="calibration is of INT4 experts"):
        quantize(Options(tmp_path, tmp_path / "out", Format.FP8, CPU, calibration=TEXTS))


def test_texts_are_read_from_files_and_drawn_from_tasks(tmp_path: Path) -> None:
    directory = made(tmp_path / "model")
    (tmp_path / "long.txt").write_text("abc " * 100)
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("one text", "another")))
    settings = {"sequences": 5, "tokens": 32}
    assert [len(each) for each in read_calibration(str(tmp_path / "long.txt"), directory, **settings).sequences] == [
        32
    ] * 5
    assert len(read_calibration(str(tmp_path / "lines.jsonl"), directory, **settings).sequences) == 2
    tasks = read_calibration("tasks", directory, **settings)
    assert len(tasks.sequences) == 5 and tasks == read_calibration("tasks", directory, **settings)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("absent.txt", None, "cannot read"),
        ("empty.jsonl", "", "holds no text to calibrate with"),
        ("bad.jsonl", '{"text": "fine"}\n{"words": 1}', r'bad.jsonl, line 2: expected a JSON object with "text"'),
    ],
)
def test_texts_that_cannot_be_read_are_named(tmp_path: Path, name: str, content: str | None, problem: str) -> None:
    directory = made(tmp_path / "model")
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=problem):
        read_calibration(str(tmp_path / name), directory, sequences=5, tokens=32)
