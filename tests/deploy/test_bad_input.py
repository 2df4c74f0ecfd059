"""What a container says that cannot start: one line, while its probe is never ready. Part of `make deploy-check`."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from mesh.errors import EndpointUnavailable
from mesh.ports import free_port
from mesh.probe import READINESS, probe

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy/compose"
TINY = ROOT / "models/tiny-r1"
pytestmark = pytest.mark.check("deploy")


def refused(service: str, config: str, *options: str, port: int | None = None) -> str:
    """The last line of a container's service that ends with a status that says not to try again."""
    health = free_port()
    server = f"server={{host: 127.0.0.1, port: {port or free_port()}, health_port: {health}}}"
    command = [sys.executable, "-P", "-m", service, "--config", str(COMPOSE / config), "--set", server, *options]
    # As in a container without NVIDIA's runtime, wherever this runs.
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while process.poll() is None:
            with pytest.raises(EndpointUnavailable):
                probe(f"127.0.0.1:{health}", READINESS, seconds=30)
            time.sleep(0.1)
        lines = process.stderr.read().splitlines()
    assert process.returncode == 2
    # Before it stands what the service logs on its way.
    assert [line for line in lines if line.startswith(service.removesuffix("_svc") + ": ")] == lines[-1:]
    assert not any("Traceback" in line for line in lines)
    return lines[-1]


def sets(*settings: str) -> Sequence[str]:
    return [part for setting in settings for part in ("--set", setting)]


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_worker_without_a_gpu_runtime() -> None:
    settings = sets(f"engine.model_dir={TINY}", "engine.device=cuda", "stores=[]")
    assert "engine.device=cuda, and torch finds no GPU" in refused("decode_svc", "decode.yaml", *settings)


@pytest.mark.parametrize("service", ["prefill", "decode"])
def test_a_worker_whose_model_volume_is_empty(service: str, tmp_path: Path) -> None:
    line = refused(f"{service}_svc", f"{service}.yaml", *sets(f"engine.model_dir={tmp_path}", "stores=[]"))
    assert f"{tmp_path}/config.json is missing" in line


def test_a_gateway_whose_model_volume_is_empty(tmp_path: Path) -> None:
    models = sets(f'models=[{{"tokenizer_dir": "{tmp_path}"}}]')
    assert str(tmp_path) in refused("gateway", "gateway.yaml", *models)


def test_a_worker_without_its_secret(tmp_path: Path) -> None:
    secret = tmp_path / "config.yaml"
    line = refused("decode_svc", "decode.yaml", "--config", str(secret), *sets(f"engine.model_dir={TINY}"))
    assert f"cannot read {secret}" in line


@pytest.mark.parametrize("service", ["scheduler", "kvstore"])
def test_a_service_whose_port_is_taken(service: str) -> None:
    with taken_port() as port:
        options = sets("index.redis_url=null") if service == "kvstore" else ()
        line = refused(service, f"{service}.yaml", *options, port=port)
    assert f"127.0.0.1:{port} (address already in use)" in line
