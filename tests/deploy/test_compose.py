"""The compose file, brought up for real. `make check-images`: needs a Docker engine with compose, and a base image.

BASE_IMAGE, REDIS_IMAGE, TORCH, CA_FILE and PIP_CONF in the environment replace what a build takes from the network.
"""

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh.ports import free_port

ROOT = Path(__file__).parents[2]
IMAGE = "deepmesh:check"
KILL_SERVICE = """
import os, pathlib, signal
for status in pathlib.Path("/proc").glob("[0-9]*/status"):
    if "PPid:\\t1\\n" in status.read_text():
        os.kill(int(status.parent.name), signal.SIGKILL)
"""
pytestmark = [
    pytest.mark.check("images"),
    pytest.mark.skipif(not shutil.which("dockerd"), reason="needs a Docker engine"),
]


class Mesh:
    def __init__(self) -> None:
        self.http_port, grpc_port = free_port(), free_port()
        ports = {"HTTP_PORT": str(self.http_port), "GRPC_PORT": str(grpc_port), "DEEPMESH_IMAGE": IMAGE}
        self._environment = {**os.environ, **ports}

    def compose(self, *arguments: str) -> str:
        command = ["docker", "compose", "-f", str(ROOT / "deploy/compose.yaml"), "-p", "deepmesh-check", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=self._environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def chat(self, question: str) -> str:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 256, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http_port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
        content: str = answer["choices"][0]["message"]["content"]
        return content


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    subprocess.run(build_command(), cwd=ROOT, check=True)
    mesh = Mesh()
    try:
        mesh.compose("up", "--detach", "--no-build", "--wait")
        yield mesh
    finally:
        mesh.compose("down", "--volumes")


def build_command() -> list[str]:
    command = ["docker", "buildx", "build", "--network", "host", "-f", "deploy/Dockerfile", "-t", IMAGE]
    for argument in ("BASE", "TORCH"):
        value = os.environ.get(f"{argument}_IMAGE" if argument == "BASE" else argument)
        command += ["--build-arg", f"{argument}={value}"] if value else []
    for secret, variable in (("ca", "CA_FILE"), ("pip", "PIP_CONF")):
        path = os.environ.get(variable)
        command += ["--secret", f"id={secret},src={path}"] if path else []
    return [*command, "."]


def test_a_chat_goes_through_prefill_decode_and_the_store(mesh: Mesh) -> None:
    assert "825" in mesh.chat("What is 358 + 467?")
    status = mesh.compose("exec", "-T", "gateway", "deepmesh", "status", "--scheduler", "scheduler:8002")
    assert status.count("serving") == 2


def test_a_decode_worker_that_is_killed_is_started_again_and_serves(mesh: Mesh) -> None:
    mesh.compose("exec", "-T", "decode", "python3", "-c", KILL_SERVICE)
    mesh.compose("up", "--detach", "--no-build", "--wait")
    assert "1023" in mesh.chat("What is 999 + 24?")


def test_containers_run_as_nobody_and_write_nowhere_but_their_cache(mesh: Mesh) -> None:
    assert mesh.compose("exec", "-T", "decode", "id", "-u").strip() == "10001"
    program = "import pathlib\ntry: pathlib.Path('/opt/x').touch()\nexcept OSError as error: print(error.errno)"
    # EROFS
    assert mesh.compose("exec", "-T", "decode", "python3", "-c", program).strip() == "30"
