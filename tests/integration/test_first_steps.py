"""Follows docs/start as new users would, in empty environments: `make check-first-steps`.

With -s it prints how long each step takes. TORCH in the environment is the torch that a clone installs, as for `make
demo`. Containers are tested in tests/deploy/test_compose.py, the chart in tests/deploy/test_chart.py.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.shipped_model import shipped_model
from mesh.ports import free_port
from tests.support.process_mesh import process_mesh
from tests.support.programs import ROOT
from tests.support.timing import timed

pytestmark = [pytest.mark.check("first-steps"), pytest.mark.slow]
PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def run(*command: str | Path, cwd: Path, stdin: str = "", **environment: str) -> str:
    """Run a command; returns its output. It cannot import anything of this checkout."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**inherited, **environment},
        input=stdin,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def test_the_programs_of_the_clients_page_answer(tmp_path: Path) -> None:
    over_http, over_grpc = PYTHON_BLOCK.findall((ROOT / "docs/start/client.md").read_text(encoding="utf-8"))
    python = tmp_path / "environment/bin/python"
    with timed("an empty environment with openai and the stubs"):
        run(sys.executable, "-m", "venv", "environment", cwd=tmp_path)
        install = ("install", "--quiet", "--constraint", ROOT / "constraints.txt", "openai", ROOT / "protos")
        run(python, "-m", "pip", *install, cwd=tmp_path)
    async with process_mesh(shipped_model()) as mesh:
        for name, program, theirs, ours, last in (
            ("openai's client", over_http, "http://127.0.0.1:8000", mesh.http_url, 'get_weather {"city": "Paris"}'),
            ("the stubs", over_grpc, "127.0.0.1:8001", mesh.grpc_endpoint, ""),
        ):
            assert theirs in program
            with timed(f"a whole answer with {name}"):
                answer = await asyncio.to_thread(run, python, "-c", program.replace(theirs, ours), cwd=tmp_path)
            # The model restates the question while it thinks.
            assert "358" in answer and answer.rstrip().endswith(last)


def test_a_clone_answers_after_make_demo_and_up(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    run("git", "clone", "--quiet", ROOT, clone, cwd=tmp_path)
    with timed("the environment of a clone"):
        run("make", ".venv/installed", cwd=clone)
    with timed("make demo"):
        assert "everything stopped" in run("make", "demo", cwd=clone)
    with up(clone / ".venv/bin/deepmesh", clone) as gateway, timed("deepmesh chat"):
        chat = ("chat", "--endpoint", gateway, "--temperature", "0")
        assert "825" in run(clone / ".venv/bin/deepmesh", *chat, cwd=clone, stdin="What is 358 + 467?")


@contextmanager
def up(deepmesh: Path, directory: Path) -> Iterator[str]:
    """Run `deepmesh up` until the block ends; gives its gRPC endpoint once it is ready."""
    options = {"--http-port": free_port(), "--grpc-port": free_port(), "--scheduler-port": free_port()}
    given = (str(part) for option in options.items() for part in option)
    command = [str(deepmesh), "up", *given, "--metrics-port", "0"]
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            with timed("deepmesh up"):
                assert any("ready: OpenAI" in line for line in process.stdout)
            yield f"127.0.0.1:{options['--grpc-port']}"
        finally:
            process.send_signal(signal.SIGINT)
            process.stdout.read()
