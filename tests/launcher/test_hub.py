"""Models by their ids on the Hub. Each case has a process of its own: the Hub's package reads its environment once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.composition import compose
from launcher.hub import find_model, served_name
from launcher.plan import MeshPlan
from mesh.errors import CheckpointError
from tests.support.hub_server import hub_server

ROOT = Path(__file__).parents[2]
MODEL = "deepseek-ai/DeepSeek-Tiny"
NOWHERE = "http://127.0.0.1:9"
PROGRAM = "from launcher.hub import find_model; import sys; print(find_model(sys.argv[1]))"


def find(name: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    command = [sys.executable, "-c", PROGRAM, name]
    return subprocess.run(
        command, cwd=ROOT, env={**kept, "HF_HOME": str(home), **environment}, capture_output=True, text=True, timeout=60
    )


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "consolidated.pth").write_bytes(b"the same in another format")
    return folder


def test_a_model_is_downloaded_once_and_then_found_offline(published: Path, tmp_path: Path) -> None:
    with hub_server({MODEL: published}) as address:
        done = find(MODEL, tmp_path, HF_ENDPOINT=address)
    folder = Path(done.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == (published / "model.safetensors").read_bytes(), done.stderr
    assert not (folder / "consolidated.pth").exists()
    assert find(MODEL, tmp_path, HF_HUB_OFFLINE="1").stdout.strip() == str(folder)


def test_a_cache_that_lacks_weights_is_completed(published: Path, tmp_path: Path) -> None:
    with hub_server({MODEL: published}) as address:
        folder = Path(find(MODEL, tmp_path, HF_ENDPOINT=address).stdout.strip())
        (folder / "model.safetensors").unlink()
        assert find(MODEL, tmp_path, HF_ENDPOINT=address).stdout.strip() == str(folder)
    assert (folder / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids to download it"),
        ({"HF_ENDPOINT": NOWHERE}, "cannot be downloaded"),
    ],
    ids=["offline", "no network"],
)
def test_a_missing_model_is_told_in_a_sentence(environment: dict[str, str], complaint: str, tmp_path: Path) -> None:
    done = find(MODEL, tmp_path, **environment)
    assert done.returncode and complaint in done.stderr.splitlines()[-1]


def test_an_empty_name_is_no_folder() -> None:
    with pytest.raises(CheckpointError, match="name is empty: give a folder"):
        find_model("")


def test_an_id_that_the_hub_does_not_know_is_said(published: Path, tmp_path: Path) -> None:
    with hub_server({MODEL: published}) as address:
        done = find("deepseek-ai/Misspelt", tmp_path, HF_ENDPOINT=address)
    assert f"{address} has no such model" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["models/tiny-r1", "/no/such/folder", "file.gguf"])
def test_what_is_no_id_is_a_folder(name: str, tmp_path: Path) -> None:
    assert find(name, tmp_path).stdout.strip() == name


def test_a_model_of_the_hub_keeps_its_name(tmp_path: Path) -> None:
    plan = MeshPlan(tmp_path, model_name=served_name(MODEL))
    settings = [setting for spec in compose(plan) for setting in spec.settings]
    assert 'engine.model_name="DeepSeek-Tiny"' in settings
    assert any(setting.startswith("models=") and '"name": "DeepSeek-Tiny"' in setting for setting in settings)
    assert served_name(str(tmp_path)) is None
