import errno
import json
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.weights.headers import INDEX, SINGLE
from launcher.composition import compose
from launcher.plan import HOST, MeshPlan
from launcher.preflight import (
    TRANSPORT,
    check_metrics_ports,
    check_model_dir,
    check_ports,
    check_transfers,
)
from mesh.errors import CheckpointError, ConfigError
from mesh.ports import free_port
from tools.make_checkpoint import checkpoint_config


def checkpoint(directory: Path, shards: int = 2) -> Path:
    names = [f"model-{number}.safetensors" for number in range(shards)]
    (directory / INDEX).write_text(json.dumps({"weight_map": {f"layer.{name}": name for name in names}}))
    (directory / "config.json").write_text(json.dumps(checkpoint_config("tiny")))
    (directory / "tokenizer.json").write_text("{}")
    for name in names:
        (directory / name).write_bytes(shard_file({}))
    return directory


def shard_file(header: Mapping[str, object], data: bytes = b"") -> bytes:
    """As safetensors writes it."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_a_complete_checkpoint_passes(tmp_path: Path) -> None:
    check_model_dir(checkpoint(tmp_path))


def test_a_checkpoint_of_one_file_passes_without_an_index(tmp_path: Path) -> None:
    (checkpoint(tmp_path, shards=1) / INDEX).unlink()
    (tmp_path / "model-0.safetensors").rename(tmp_path / SINGLE)
    check_model_dir(tmp_path)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none", "there is no directory none: deepmesh serves"),
        ("deepseek-ai/DeepSeek-R1", r"there is no directory .*\(hf download deepseek-ai/DeepSeek-R1 --local-dir DIR"),
        ("model.gguf", r"model\.gguf is GGUF: deepmesh serves"),
        ("a.safetensors", r"a\.safetensors is a file: deepmesh serves"),
        ("ggufs", "ggufs has weights in GGUF: deepmesh serves"),
        ("llama", "unsupported architecture LlamaForCausalLM: deepmesh serves .*DeepseekV3ForCausalLM"),
    ],
)
def test_another_models_folder_is_told_in_a_sentence(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.safetensors").touch()
    Path("ggufs").mkdir()
    Path("ggufs/model.gguf").touch()
    Path("llama").mkdir()
    Path("llama/config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=why) as refused:
        check_model_dir(Path(name))
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-1.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (checkpoint(tmp_path) / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} (is )?missing"):
        check_model_dir(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "model-1.safetensors"])
def test_a_clone_without_its_large_files_is_refused(tmp_path: Path, name: str) -> None:
    (checkpoint(tmp_path) / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match=rf"{name} is a pointer of Git LFS .* run git lfs pull"):
        check_model_dir(tmp_path)


def test_the_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    beyond = {"added_tokens": [{"id": checkpoint_config("tiny")["vocab_size"], "content": "<|end|>"}]}
    (checkpoint(tmp_path) / "tokenizer.json").write_text(json.dumps(beyond))
    with pytest.raises(ConfigError, match=r"tokenizer\.json has 321 tokens and the model 320: .* of another model"):
        check_model_dir(tmp_path)


def test_a_vision_tower_alone_is_refused(tmp_path: Path) -> None:
    header = {"vision_tower.patches": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}
    (checkpoint(tmp_path) / "model-1.safetensors").write_bytes(shard_file(header))
    with pytest.raises(CheckpointError, match="holds a vision tower and no language model: only text is served"):
        check_model_dir(tmp_path)


def test_a_shard_of_another_user_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, opened = checkpoint(tmp_path), Path.open

    # No file is unreadable to the super user, as whom tests may run.
    def refuse_shards(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse_shards)
    with pytest.raises(CheckpointError, match=r"cannot read .*model-0\.safetensors: Permission denied"):
        check_model_dir(directory)


def test_no_weights_at_all_are_missed(tmp_path: Path) -> None:
    for path in [*checkpoint(tmp_path).glob("*.safetensors"), tmp_path / INDEX]:
        path.unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        check_model_dir(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_unreadable_index_is_named(tmp_path: Path, text: str) -> None:
    (checkpoint(tmp_path) / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=r"cannot read|expected a JSON object|has no weight_map"):
        check_model_dir(tmp_path)


def test_a_truncated_shard_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    header = {"layer": {"dtype": "BF16", "shape": [8, 8], "data_offsets": [0, 128]}}
    (checkpoint(tmp_path) / "model-1.safetensors").write_bytes(shard_file(header, bytes(127)))
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors is truncated: \d+ bytes of \d+"):
        check_model_dir(tmp_path)


def test_a_plan_that_moves_kv_needs_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, TRANSPORT, None)
    check_transfers(MeshPlan(None))
    with pytest.raises(ConfigError, match="need the package ucxx"):
        check_transfers(MeshPlan(None, prefill_workers=1))


def test_free_ports_pass() -> None:
    check_ports([("--http-port", HOST, free_port()), ("--grpc-port", HOST, free_port())])


def test_taken_ports_name_themselves_and_their_flags() -> None:
    with socket.create_server((HOST, 0)) as http, socket.create_server((HOST, 0)) as scheduler:
        (_, first), (_, second) = http.getsockname(), scheduler.getsockname()
        with pytest.raises(ConfigError) as caught:
            check_ports(
                [("--http-port", HOST, first), ("--grpc-port", HOST, free_port()), ("--scheduler-port", HOST, second)]
            )
    in_use = "(address already in use)"
    assert caught.value.message == (
        f"cannot listen on {HOST}:{first} {in_use}, {HOST}:{second} {in_use}: "
        "choose others with --http-port, --scheduler-port"
    )


def test_an_address_that_this_machine_has_not_names_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 256\.0\.0\.1 .*--host"):
        check_ports([("--http-port", "256.0.0.1", free_port())])


def test_a_taken_metrics_port_names_the_service_and_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        plan = MeshPlan(None, metrics_port=taken.getsockname()[1] - 1)
        with pytest.raises(ConfigError, match=r"metrics of scheduler on 127\.0\.0\.1:\d+ .*--metrics-port"):
            check_metrics_ports(compose(plan))
        check_metrics_ports(compose(MeshPlan(None)))


def test_one_port_for_two_services_is_refused() -> None:
    port = free_port()
    with pytest.raises(ConfigError, match="different ports"):
        check_ports([("--http-port", HOST, port), ("--grpc-port", HOST, port)])


def test_weights_that_are_drawn_need_no_files(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    for shard in folder.glob("*.safetensors*"):
        shard.unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        check_model_dir(folder)
    check_model_dir(folder, weights=False)
