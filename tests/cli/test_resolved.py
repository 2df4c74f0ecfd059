"""`deepmesh config decode --resolved` and the options of aims."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from capacity.shapes import DEEPSEEK_R1, EXPERTS
from cli.commands import build
from mesh.errors import ConfigError

R1 = dict(DEEPSEEK_R1) | {"num_nextn_predict_layers": 1, "quantization_config": EXPERTS["w4a8"]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(R1, default=dict))
    return tmp_path


def resolved(model: Path, *options: str) -> str:
    return CliRunner().invoke(build(), ["config", "decode", "--resolved", "--model", str(model), *options]).output


def test_choices_are_shown_with_reasons_and_memory(model: Path) -> None:
    out = resolved(model, "--gpus", "4", "--gpu", "h200")
    assert "decode worker on 4 x h200, for balanced\n" in out
    assert "engine.drafts.next_n=auto: 2.5, 2.0 and 1.6 times" in out
    assert re.search(r"memory of a GPU, reckoned, GB: weights 105\.4, copies 2\.6, .*; KV [\d,]+ tokens\n", out)


def test_given_settings_are_shown_as_given(model: Path) -> None:
    out = resolved(model, "--gpus", "4", "--gpu", "h200", "--set", "engine.max_requests=8", "--aim", "latency")
    assert "engine.max_requests=8: as given" in out and "tp 4, dp 1, ep 1" in out


def test_without_gpus_the_defaults_stay(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.resolved.cards_for", lambda engine: ())
    assert resolved(model) == "decode worker on the CPU: defaults, unless you name a --gpu, for balanced\n"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--gpu", "h201"), r"--gpu h201: unknown \(did you mean h20"),
        (("--aim", "latncy"), r"--aim latncy: expected balanced, throughput or latency \(did you mean latency\?\)"),
        (
            ("--set", "engine.max_request=8"),
            r"--set: unknown key engine\.max_request \(did you mean engine\.max_requests",
        ),
        (("--set", "engine=8"), r"--set: engine: expected keys"),
        (("--set", "decode.engine.max_requests=8"), r"leave out decode\., keys are those of this service"),
        (("--gpu", "h200"), r"the model takes 358\.\d GB on one GPU"),
        (("--gpu", "h200", "--exact", "--set", "engine.kv_dtype=float8_e4m3fn"), r"engine\.exact keeps the published"),
    ],
)
def test_what_cannot_be_is_told_in_a_sentence(options: tuple[str, ...], told: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        build()(["config", "decode", "--resolved", "--model", str(model), *options], standalone_mode=False)


@pytest.mark.parametrize("arguments", [["decode", "--resolved"], ["gateway", "--resolved", "--model", "."]])
def test_only_a_workers_choices_for_a_model_are_shown(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="deepmesh config decode --resolved --model DIR"):
        build()(["config", *arguments], standalone_mode=False)


@pytest.mark.parametrize("option", [("--set", "engine.max_requests=8"), ("--gpus", "4"), ("--aim", "latency")])
def test_choices_are_asked_for_with_resolved_alone(option: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"are for --resolved: deepmesh config decode --resolved"):
        build()(["config", "decode", *option], standalone_mode=False)
