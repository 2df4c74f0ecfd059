"""What compose's files and variables make of the services (launcher/container.py), without Docker."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from decode_svc.config import DecodeConfig
from gateway.config import GatewayConfig
from launcher.container import program_of
from mesh.config_values import load
from mesh.errors import CheckpointError, ConfigError
from mesh.launch import Program
from prefill_svc.config import PrefillConfig
from tests.support.compose_files import services
from tests.support.other_version import ROOT
from worker.config import WorkerConfig

CPU, GPU = ("compose.yaml",), ("compose.yaml", "compose.gpu.yaml")
CONFIGS: Mapping[str, type[WorkerConfig]] = {"decode": DecodeConfig, "prefill": PrefillConfig}
MODELS = ROOT / "models"


def program_in(models: Path, role: str, files: tuple[str, ...], variables: Mapping[str, str]) -> Program:
    environment = services(files, variables)[role]["environment"]
    return program_of(role, {name: value for name, value in environment.items() if value is not None}, models)


def program(role: str, files: tuple[str, ...] = CPU, **variables: str) -> Program:
    return program_in(MODELS, role, files, variables)


def worker(role: str, files: tuple[str, ...] = CPU, **variables: str) -> WorkerConfig:
    settings = program(role, files, **variables).settings
    return load(CONFIGS[role], ROOT / f"deploy/compose/{role}.yaml", settings)


def replicas(role: str, **variables: str) -> int:
    return int(services(GPU, variables)[role]["deploy"]["replicas"])


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_one_decode_worker_has_a_rank_on_each_gpu(gpus: int) -> None:
    engine = worker("decode", GPU, GPUS=str(gpus)).engine
    assert (engine.device, engine.parallel.world) == ("cuda", gpus)
    visible = ",".join(map(str, range(gpus)))
    assert program("decode", GPU, GPUS=str(gpus)).environment == {"CUDA_VISIBLE_DEVICES": visible}
    assert replicas("prefill", GPUS=str(gpus)) == 0


@pytest.mark.parametrize(
    ("gpus", "split", "decode", "prefill"),
    [
        ("2", "1P+1D", "0,1", "1,0"),
        ("8", "1P+1D", "0,1,2,3,4,5,6,7", "4,5,6,7,0,1,2,3"),
        ("8", "1Px2+1Dx6", "0,1,2,3,4,5,6,7", "6,7,0,1,2,3,4,5"),
    ],
)
def test_a_split_gives_each_worker_its_gpus_first(gpus: str, split: str, decode: str, prefill: str) -> None:
    said = {"GPUS": gpus, "SPLIT": split}
    assert program("decode", GPU, **said).environment["CUDA_VISIBLE_DEVICES"] == decode
    assert program("prefill", GPU, **said).environment["CUDA_VISIBLE_DEVICES"] == prefill
    ranks = [worker(role, GPU, **said).engine.parallel.world for role in CONFIGS]
    assert sum(ranks) == int(gpus)
    assert replicas("prefill", **said) == 1


@pytest.mark.parametrize(("files", "seconds"), [(CPU, 10), (GPU, 120)])
def test_requests_wait_for_the_start_of_a_worker(files: tuple[str, ...], seconds: float) -> None:
    command = services(files, {})["gateway"]["command"]
    first, *others = [ROOT / "deploy/compose" / Path(each).name for each in command if each.endswith(".yaml")]
    assert load(GatewayConfig, first, overlays=others).dispatch.worker_seconds == seconds


def test_the_mesh_may_have_other_gpus_than_the_first() -> None:
    said = program("prefill", GPU, GPUS="2", SPLIT="1P+1D", DEVICES="6,7")
    assert said.environment == {"CUDA_VISIBLE_DEVICES": "7,6"}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"GPUS": "eight"}, "GPUS=eight: expected how many GPUs"),
        ({"GPUS": "0"}, "GPUS=0: expected how many GPUs"),
        ({"GPUS": "3", "SPLIT": "1P+1D"}, r"SPLIT=1P\+1D does not divide GPUS=3"),
        ({"GPUS": "4", "SPLIT": "both"}, "SPLIT=both: expected how many workers"),
        ({"GPUS": "4", "SPLIT": "2P+1Dx2"}, r"SPLIT=2P\+1Dx2: compose starts one worker of each role"),
        ({"GPUS": "4", "SPLIT": "1D"}, "GPUS=4 and SPLIT=1D have no prefill worker: say SPLIT=1P"),
        ({"GPUS": "8", "SPLIT": "2P+3D"}, r"SPLIT=2P\+3D: compose starts one worker of each role"),
        ({"GPUS": "4", "SPLIT": "1P+1D", "DEVICES": "6,7"}, "GPUS=4, and DEVICES=6,7 names 2"),
        ({"GPUS": "2", "SPLIT": "1P+1D", "DEVICES": "6,6"}, "GPUS=2, and DEVICES=6,6 names 1"),
        (
            {"GPUS": "2", "SPLIT": "1P+1D", "PREFILL_SET": "engine.model_name='tiny"},
            "PREFILL_SET: a quote is not closed",
        ),
        (
            {"GPUS": "2", "SPLIT": "1P+1D", "PREFILL_SET": "engine.max_requests 7"},
            "PREFILL_SET has 'engine.max_requests': expected KEY=VALUE, separated by spaces",
        ),
    ],
)
def test_what_compose_cannot_do_is_said(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        program("prefill", GPU, **variables)


def test_gpus_without_the_file_for_them_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"GPUS=4 and SPLIT=1D .* compose.gpu.yaml is needed too"):
        program("prefill", CPU, GPUS="4")
    assert worker("decode", CPU, GPUS="4").engine.device == "cuda"
    assert worker("decode", CPU).engine.device != "cuda"


def test_processes_that_move_kv_share_their_process_ids_alone() -> None:
    found = services(GPU, {})
    for service in ("decode", "prefill", "kvstore"):
        # With a shared IPC namespace UCX would choose memory that wakes no process in another network.
        assert found[service]["pid"] == "service:box" and "ipc" not in found[service]


@pytest.mark.parametrize("role", CONFIGS)
def test_each_worker_sees_every_gpu(role: str) -> None:
    [devices] = services(GPU, {})[role]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


@pytest.mark.parametrize("role", CONFIGS)
def test_settings_of_a_role_are_the_last_word(role: str) -> None:
    said = {f"{role.upper()}_SET": "engine.max_requests=7 engine.device=cpu 'engine.parallel={tp: 1}'"}
    engine = worker(role, GPU, GPUS="2", SPLIT="1P+1D", **said).engine
    assert (engine.max_requests, engine.device, engine.parallel.tp) == (7, "cpu", 1)
    [other] = CONFIGS.keys() - {role}
    assert worker(other, GPU, GPUS="2", SPLIT="1P+1D", **said).engine.device == "cuda"


@pytest.mark.parametrize("files", [CPU, GPU])
def test_every_service_has_what_compose_yaml_gives_it(files: tuple[str, ...]) -> None:
    found = services(files, {"KV_SECRET": "kv", "RESUME_SECRET": "resume", "COSTS": "costs.json"})
    told = {
        name: json.loads(found[name]["environment"]["DEEPMESH_SETTINGS"]) for name in ("decode", "gateway", "scheduler")
    }
    assert told["decode"] == ["kv.secret=kv"]
    assert told["gateway"] == ["resume.secret=resume"]
    assert told["scheduler"] == ["placement.costs=/models/costs.json"]


def served(model: str, models: Path) -> tuple[Path, str]:
    """Where gateway and worker find the model, which is the same place, and by which name they serve it."""
    settings = program_in(models, "gateway", CPU, {"MODEL": model}).settings
    [found] = load(GatewayConfig, ROOT / "deploy/compose/gateway.yaml", settings).models
    engine = load(
        DecodeConfig, ROOT / "deploy/compose/decode.yaml", program_in(models, "decode", CPU, {"MODEL": model}).settings
    ).engine
    assert (found.tokenizer_dir, found.served_name) == (engine.model_dir, engine.model_name)
    return found.tokenizer_dir, found.served_name


def test_a_model_is_a_folder_of_the_volume() -> None:
    assert served("tiny-r1", MODELS) == (MODELS / "tiny-r1", "tiny-r1")


def test_a_model_is_found_in_hugging_faces_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub/models--deepseek-ai--DeepSeek-Tiny/snapshots/0123456789012345678901234567890123456789"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    # The package has read HF_HOME already, if another test imported it.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert served("deepseek-ai/DeepSeek-Tiny", tmp_path) == (snapshot, "DeepSeek-Tiny")


@pytest.mark.parametrize(
    ("folders", "what"),
    [((), "it is empty"), (("R1-INT4", "tiny-r1"), "it has R1-INT4, tiny-r1")],
    ids=["none", "others"],
)
def test_a_folder_that_is_not_in_the_volume_is_said(folders: tuple[str, ...], what: str, tmp_path: Path) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir()
    words = re.escape(f"MODEL=R1: MODELS_DIR, which is {tmp_path} here, has no such folder ({what})")
    with pytest.raises(CheckpointError, match=words):
        program_in(tmp_path, "decode", CPU, {"MODEL": "R1"})


def test_a_model_that_is_nowhere_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="and HF_HUB_OFFLINE forbids to download it"):
        program_in(tmp_path, "decode", CPU, {"MODEL": "deepseek-ai/DeepSeek-Tiny"})


def test_the_program_becomes_the_service_it_names() -> None:
    variables = {
        "MODEL": str(MODELS / "tiny-r1"),
        "DEEPMESH_SETTINGS": '["kv.secret=of all the workers"]',
        "DECODE_SET": "worker_id=d",
    }
    command = [
        sys.executable,
        "-m",
        "launcher.container",
        "decode",
        "--config",
        "deploy/compose/decode.yaml",
        "--check",
    ]
    options: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, **variables}, "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=120, **options)
    assert done.returncode == 0, done.stderr
    config = json.loads(done.stdout)
    assert (config["worker_id"], config["engine"]["model_name"]) == ("d", "tiny-r1")
    assert config["kv"]["secret"] == "**********"
