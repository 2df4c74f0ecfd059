import io
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from eval import matrix
from eval.matrix import CHECKPOINTS, CONFIGURATIONS, checkpoints, configurations, evaluate_matrix
from eval.options import EvalOptions
from eval.perplexity import Document
from eval.results import Result
from launcher.composition import compose
from launcher.plan import MeshPlan
from mesh.errors import ConfigError


def checkpoint(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


async def test_every_configuration_is_evaluated_with_its_checkpoint_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[EvalOptions] = []

    async def record(options: EvalOptions, documents: Sequence[Document], console: Console) -> Result:
        asked.append(options)
        return Result(name="", model="", settings={}, scores=[], perplexity=None, outcomes=[], documents=[])

    monkeypatch.setattr(matrix, "evaluate", record)
    monkeypatch.setattr(matrix, "find_gpus", lambda: ["gpu"])
    forms = {form: tmp_path / form for form in CHECKPOINTS}
    options = EvalOptions(model_dir=forms["fp8"], out=tmp_path, suite="all", settings=("decode.engine.threads=1",))
    found = await evaluate_matrix(options, forms, [], Console(file=io.StringIO()))
    assert [result.name for result in found] == [configuration.name for configuration in CONFIGURATIONS]
    assert [each.model_dir for each in asked] == [forms[configuration.checkpoint] for configuration in CONFIGURATIONS]
    assert all(each.settings[-1] == "decode.engine.threads=1" and each.suite == "all" for each in asked)
    assert "decode.engine.weights=dequantized" in asked[0].settings
    assert all("decode.engine.weights=quantized" in each.settings for each in asked[1:])
    assert len({each.directory for each in asked}) == len(CONFIGURATIONS)


@pytest.mark.parametrize(("settings", "gpus"), [((), []), (("decode.engine.device=cpu",), ["gpu"])])
def test_a_cpu_evaluates_what_it_has_kernels_for(settings: Sequence[str], gpus: Sequence[str]) -> None:
    names = {each.name for each in configurations(settings, gpus)}
    assert names == {each.name for each in CONFIGURATIONS if not each.on_gpus} < {each.name for each in CONFIGURATIONS}
    assert configurations((), ["gpu"]) == list(CONFIGURATIONS)


def test_every_configuration_can_be_composed() -> None:
    for configuration in CONFIGURATIONS:
        assert configuration.checkpoint in CHECKPOINTS
        compose(MeshPlan(Path("model"), settings=configuration.settings))


def test_a_named_checkpoint_replaces_the_known_one(tmp_path: Path) -> None:
    named = [f"{form}={checkpoint(tmp_path / form)}" for form in CHECKPOINTS]
    assert checkpoints(named) == {form: tmp_path / form for form in CHECKPOINTS}


@pytest.mark.parametrize("wrong", ["fp4=somewhere", "fp8"])
def test_an_unknown_form_is_refused_with_the_known_ones(wrong: str) -> None:
    with pytest.raises(ConfigError, match="expected FORM=DIR, the form being fp8, w4a8, w4a8-awq"):
        checkpoints([wrong])


def test_a_checkpoint_that_is_not_there_is_asked_for(tmp_path: Path) -> None:
    fp8, absent = checkpoint(tmp_path / "fp8"), tmp_path / "absent"
    how = f"deepmesh quantize {fp8} --format w4a8 --out {absent}"
    wanted = f"no w4a8 checkpoint in {absent}: name one with --checkpoint w4a8=DIR, or make it: {how}"
    with pytest.raises(ConfigError, match=f"^{re.escape(wanted)}$"):
        checkpoints([f"fp8={fp8}", f"w4a8={absent}"])
