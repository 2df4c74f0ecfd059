"""Checkpoints in INT4 of other tools as sources of `deepmesh quantize`."""

import json
from pathlib import Path

import pytest
import torch

from engine.model.config import read_model_config
from engine.model.quantization import Stored
from tests.support.checkpoints import read_tensors, rewrite_as_one_file
from tests.support.int4 import WIDE
from tests.support.packed import CONFIGS, as_kimi_k25, packed_checkpoint
from tools.quantize.forms import Format
from tools.quantize.run import Options, quantize

CPU = torch.device("cpu")


def assert_same(found: Path, expected: Path) -> None:
    ours, theirs = read_tensors(found), read_tensors(expected)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype, name
        assert torch.equal(ours[name].flatten().view(torch.uint8), theirs[name].flatten().view(torch.uint8)), name


@pytest.fixture(scope="module", params=CONFIGS)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return packed_checkpoint(tmp_path_factory.mktemp("packed"), request.param, **WIDE)


@pytest.mark.parametrize("form", Format, ids=lambda form: form.value)
def test_the_result_is_that_of_the_float32_twin(form: Format, packed: tuple[Path, Path], tmp_path: Path) -> None:
    source, twin = packed
    reports = quantize(Options(source, tmp_path / "out", form, CPU))
    assert reports == quantize(Options(twin, tmp_path / "twin", form, CPU))
    assert_same(tmp_path / "out", tmp_path / "twin")
    # Rounding again adds an error of its own, which is reported.
    error = {Format.FP8: "fp8_error", Format.W4A8: "int4_error", Format.NVFP4: "nvfp4_error"}[form]
    assert all(0.005 < getattr(report, error) < 0.15 for report in reports[2:])


def test_kimi_k25_becomes_a_model_of_text(tmp_path: Path) -> None:
    source, twin = packed_checkpoint(tmp_path, "compressed-tensors", **WIDE)
    as_kimi_k25(source)
    quantize(Options(source, tmp_path / "out", Format.W4A8, CPU))
    quantize(Options(twin, tmp_path / "twin", Format.W4A8, CPU))
    assert_same(tmp_path / "out", tmp_path / "twin")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"] and "vision_config" not in config
    assert read_model_config(tmp_path / "out").quantization.experts is Stored.INT4


def test_matrices_that_a_tool_left_out_stay_plain(tmp_path: Path) -> None:
    source, twin = packed_checkpoint(tmp_path, "awq", **WIDE)
    name = "model.layers.0.self_attn.kv_b_proj"
    left_out = read_tensors(twin)[f"{name}.weight"].half()

    def leave_out(tensors: dict[str, torch.Tensor]) -> None:
        for kind in ("qweight", "qzeros", "scales"):
            del tensors[f"{name}.{kind}"]
        tensors[f"{name}.weight"] = left_out

    rewrite_as_one_file(source, leave_out)
    quantize(Options(source, tmp_path / "out", Format.NVFP4, CPU))
    assert torch.equal(read_tensors(tmp_path / "out")[f"{name}.weight"], left_out.bfloat16())
