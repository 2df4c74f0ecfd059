"""What `deepmesh plan` says of a model that does not fit, and why."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capacity.shapes import DEEPSEEK_R1, SHAPES
from cli.commands import build
from tests.support.packed import CONFIGS


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--gpus", "4"), "no: a GPU lacks 40.3 GB for weights and work: take more GPUs"),
        (("--gpus", "8", "--tpot-ms", "1"), "no: not even one request keeps 1 ms a token"),
        (("--gpus", "8", "--isl", "600000"), "tokens of KV on a GPU are less than one request"),
    ],
)
def test_a_model_that_does_not_fit_lacks_memory(options: tuple[str, ...], told: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_R1, default=dict))
    done = CliRunner().invoke(build(), ["plan", "--model", str(tmp_path), *options])
    assert done.exit_code == 1
    assert told in done.stdout


def test_a_card_by_datasheet_is_said_to_be_unmeasured(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_R1, default=dict))
    done = CliRunner().invoke(build(), ["plan", "--model", str(tmp_path), "--gpu", "b200", "--gpus", "8"])
    assert done.exit_code == 0
    assert "not measured: NVIDIA HGX B200 datasheet" in done.stdout
    assert "190 GB; taken to keep up copy 6.80 TB/s" in done.stdout


def test_packed_weights_are_said_to_be_counted_otherwise(tmp_path: Path) -> None:
    packed = {**DEEPSEEK_R1, "quantization_config": CONFIGS["awq"]}
    (tmp_path / "config.json").write_text(json.dumps(packed, default=dict))
    done = CliRunner().invoke(build(), ["plan", "--model", str(tmp_path), "--gpus", "8"])
    assert done.exit_code == 0
    assert "counted as deepmesh quantize --format w4a8 makes" in done.stdout


# Weights of 59.9 GB, of 30.5 in FP8.
def test_plain_weights_are_planned_as_they_would_be_quantized(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["glm-flash"], default=dict))
    asked = ["plan", "--model", str(tmp_path), "--gpu", "l40s", "--gpus", "1"]
    as_published, quantized = (CliRunner().invoke(build(), [*asked, *more]) for more in ([], ["--weights", "fp8"]))
    assert as_published.exit_code == 1
    assert "take more GPUs, or quantize it while it loads (--weights fp8)" in as_published.stdout
    assert quantized.exit_code == 0
