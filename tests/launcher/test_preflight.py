import json
import socket
import sys
from pathlib import Path

import pytest

from launcher.composition import compose
from launcher.plan import MeshPlan
from launcher.preflight import (
    INDEX,
    TRANSPORT,
    check_metrics_ports,
    check_model_dir,
    check_ports,
    check_transfers,
)
from mesh.errors import CheckpointError, ConfigError
from mesh.ports import free_port


def checkpoint(directory: Path, shards: int = 2) -> Path:
    names = [f"model-{number}.safetensors" for number in range(shards)]
    (directory / INDEX).write_text(json.dumps({"weight_map": {f"layer.{name}": name for name in names}}))
    for name in ("config.json", "tokenizer.json", *names):
        (directory / name).write_text("{}")
    return directory


def test_a_complete_checkpoint_passes(tmp_path: Path) -> None:
    check_model_dir(checkpoint(tmp_path))


def test_a_checkpoint_of_one_file_passes_without_an_index(tmp_path: Path) -> None:
    (checkpoint(tmp_path) / INDEX).unlink()
    check_model_dir(tmp_path)


def test_a_missing_directory_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="write a model with deepmesh make-checkpoint"):
        check_model_dir(tmp_path / "none")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-1.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (checkpoint(tmp_path) / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} missing"):
        check_model_dir(tmp_path)


def test_no_weights_at_all_are_missed(tmp_path: Path) -> None:
    for path in [*checkpoint(tmp_path).glob("*.safetensors"), tmp_path / INDEX]:
        path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors missing"):
        check_model_dir(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_unreadable_index_is_named(tmp_path: Path, text: str) -> None:
    (checkpoint(tmp_path) / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="cannot read"):
        check_model_dir(tmp_path)


def test_a_plan_that_moves_kv_is_refused_without_the_package_that_carries_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, TRANSPORT, None)
    check_transfers(MeshPlan(None))
    with pytest.raises(ConfigError, match="need the package ucxx"):
        check_transfers(MeshPlan(None, prefill_workers=1))


def test_free_ports_pass() -> None:
    check_ports({"--http-port": free_port(), "--grpc-port": free_port()})


def test_a_taken_port_names_itself_and_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} \(address already in use\).*--grpc-port"):
            check_ports({"--http-port": free_port(), "--grpc-port": port})


def test_an_address_that_this_machine_has_not_names_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 256\.0\.0\.1:\d+ .*--host"):
        check_ports({"--http-port": free_port()}, "256.0.0.1")


def test_a_taken_metrics_port_names_the_service_and_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        plan = MeshPlan(None, metrics_port=taken.getsockname()[1] - 1)
        with pytest.raises(ConfigError, match=r"metrics of scheduler on 127\.0\.0\.1:\d+ .*--metrics-port"):
            check_metrics_ports(compose(plan))
        check_metrics_ports(compose(MeshPlan(None)))


def test_one_port_for_two_services_is_refused() -> None:
    port = free_port()
    with pytest.raises(ConfigError, match="different ports"):
        check_ports({"--http-port": port, "--grpc-port": port})
