"""A run of tests that is told to stop: what it leaves."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from gateway.processes.shared_directory import LOCK
from tests.support.waiting import eventually

ROOT = Path(__file__).parent.parent
UNENDING = """
import asyncio
from tests.support.tokenizers import tokenizer_directory

async def test_unending():
    tokenizer_directory(512, 4096)
    await asyncio.sleep(60)
"""


async def test_a_stopped_run_of_tests_leaves_no_directory(tmp_path: Path) -> None:
    test, scratch = tmp_path / "test_unending.py", tmp_path / "scratch"
    test.write_text(UNENDING)
    # A run that was killed left it.
    left_behind = scratch / "deepmesh-tests-old"
    left_behind.mkdir(parents=True)
    (left_behind / LOCK).touch()
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"), str(test)]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    run = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment, stdout=asyncio.subprocess.DEVNULL)
    try:
        await eventually(lambda: any(scratch.glob("deepmesh-tests-*/tokenizer-*")))
        run.send_signal(signal.SIGTERM)
        # Interrupted.
        assert await run.wait() == 2
    finally:
        if run.returncode is None:
            run.kill()
    assert not list(scratch.iterdir())
