"""The image built and the compose file brought up for real. `make check-images`: needs a Docker engine with compose.

BASE_IMAGE, REDIS_IMAGE, TORCH, CA_FILE and PIP_CONF in the environment replace what a build takes from the network.
AGAINST names the commit that the upgrade begins with, by default the last release.
"""

import itertools
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.compose_files import services
from tests.support.compose_mesh import ComposeMesh, build_image
from tests.support.other_version import ROOT, extract_other_version

OURS, THEIRS = "deepmesh:check", "deepmesh:check-other"
KILL_SERVICE = """
import os, pathlib, signal
for status in pathlib.Path("/proc").glob("[0-9]*/status"):
    if "PPid:\\t1\\n" in status.read_text():
        os.kill(int(status.parent.name), signal.SIGKILL)
"""
QUESTIONS = ("What is 358 + 467?", "What is 999 + 24?")
# On a machine so busy that a token takes a second, such an answer still ends while its worker drains.
BEGIN_TOKENS = 8
SERVICES = ("scheduler", "kvstore", "prefill", "decode", "gateway")
pytestmark = [
    pytest.mark.check("images"),
    pytest.mark.skipif(not shutil.which("dockerd"), reason="needs a Docker engine"),
]


@pytest.fixture(scope="module")
def mesh() -> Iterator[ComposeMesh]:
    build_image(ROOT, OURS)
    mesh = ComposeMesh("deepmesh-check")
    try:
        mesh.up(ROOT, OURS)
        yield mesh
    finally:
        mesh.down(ROOT)


def test_a_chat_goes_through_prefill_decode_and_the_store(mesh: ComposeMesh) -> None:
    assert "825" in mesh.answer("What is 358 + 467?")
    status = mesh.run("exec", "-T", "gateway", "deepmesh", "status", "--scheduler", "scheduler:8002")
    assert status.count("serving") == 2


def test_each_container_is_unprivileged_and_writes_only_its_cache(mesh: ComposeMesh) -> None:
    program = "import pathlib\ntry: pathlib.Path('/opt/x').touch()\nexcept OSError as error: print(error.errno)"
    for service in SERVICES:
        assert mesh.run("exec", "-T", service, "id", "-u").strip() == "10001"
        # EROFS
        assert mesh.run("exec", "-T", service, "python3", "-c", program).strip() == "30"


def test_the_image_lists_what_is_in_it(mesh: ComposeMesh) -> None:
    listed = json.loads(mesh.run("exec", "-T", "gateway", "cat", "/opt/deepmesh/sbom.json"))
    names = {each["name"] for each in listed["components"]}
    assert {"deepmesh", "deepmesh-protos", "deepmesh-tiny-r1", "torch", "grpcio"} <= names
    assert all(each.get("version") for each in listed["components"])


def test_a_killed_decode_worker_is_started_again(mesh: ComposeMesh) -> None:
    before = mesh.container("decode")
    mesh.run("exec", "-T", "decode", "python3", "-c", KILL_SERVICE)
    mesh.until(lambda: mesh.container("decode").started != before.started)
    mesh.until(lambda: mesh.container("decode").health == "healthy")
    assert "1023" in mesh.answer("What is 999 + 24?")


def test_an_upgrade_loses_no_request(mesh: ComposeMesh, tmp_path: Path) -> None:
    theirs = extract_other_version(tmp_path)
    build_image(theirs, THEIRS)
    mesh.up(theirs, THEIRS)
    right = {question: mesh.answer(question, BEGIN_TOKENS) for question in QUESTIONS}
    answers: list[tuple[str, str]] = []
    failed: list[BaseException] = []
    stopped = threading.Event()

    def ask_on() -> None:
        try:
            for question in itertools.cycle(QUESTIONS):
                answers.append((question, mesh.answer(question, BEGIN_TOKENS)))
                if stopped.is_set():
                    return
        except (AssertionError, OSError) as error:
            failed.append(error)

    asking = threading.Thread(target=ask_on)
    asking.start()
    try:
        mesh.until(lambda: bool(answers or failed))
        mesh.up(ROOT, OURS)
        upgraded = len(answers)
        mesh.until(lambda: len(answers) > upgraded + 1 or bool(failed))
    finally:
        stopped.set()
        asking.join()
    assert not failed
    assert [answer for question, answer in answers] == [right[question] for question, _ in answers]
    sys.stdout.write(f"{len(answers)} answers while it was upgraded\n")
    assert {mesh.container(service).image for service in SERVICES} == {OURS}


@pytest.mark.parametrize("gpus", ["1", "2", "8"])
@pytest.mark.parametrize(("split", "prefills"), [("", 0), ("1P+1D", 1)], ids=["whole", "split"])
def test_compose_reads_the_files_as_our_tests_do(gpus: str, split: str, prefills: int, mesh: ComposeMesh) -> None:
    variables = {"GPUS": gpus, "SPLIT": split}
    command = ["docker", "compose", "-f", "compose.yaml", "-f", "compose.gpu.yaml", "config", "--format", "json"]
    options: dict[str, Any] = {"capture_output": True, "text": True, "env": mesh.environment(OURS) | variables}
    done = subprocess.run(command, cwd=ROOT / "deploy", **options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["services"]
    ours = services(("compose.yaml", "compose.gpu.yaml"), variables)
    assert found["prefill"]["deploy"]["replicas"] == prefills
    for role in ("prefill", "decode"):
        for key in ("command", "pid"):
            assert found[role][key] == ours[role][key]
        for name in ("GPUS", "SPLIT", "MODEL"):
            assert found[role]["environment"][name] == ours[role]["environment"][name]


def test_gpus_without_nvidias_runtime_are_refused(mesh: ComposeMesh) -> None:
    if shutil.which("nvidia-container-runtime"):
        pytest.skip("this engine has NVIDIA's runtime")
    files = ["-f", str(ROOT / "deploy/compose.yaml"), "-f", str(ROOT / "deploy/compose.gpu.yaml")]
    compose = ["docker", "compose", *files, "-p", "deepmesh-gpus"]
    options: dict[str, Any] = {"capture_output": True, "text": True, "env": mesh.environment(OURS)}
    try:
        done = subprocess.run([*compose, "up", "--detach", "--no-build", "--no-deps", "box", "decode"], **options)
        assert done.returncode != 0
        assert 'could not select device driver "nvidia"' in done.stderr.splitlines()[-1]
    finally:
        subprocess.run([*compose, "down", "--volumes"], **options)
