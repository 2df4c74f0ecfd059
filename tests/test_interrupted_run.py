"""A run of tests that is told to stop: what it leaves."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

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
    # A run that was killed two days ago left it.
    left_behind = scratch / "deepmesh-tokenizer-old"
    left_behind.mkdir(parents=True)
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(left_behind, (two_days_ago, two_days_ago))
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"), str(test)]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    run = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment, stdout=asyncio.subprocess.DEVNULL)
    try:
        await eventually(lambda: any(scratch.glob("deepmesh-tokenizer-*/*")))
        run.send_signal(signal.SIGTERM)
        # Interrupted.
        assert await run.wait() == 2
    finally:
        if run.returncode is None:
            run.kill()
    assert not list(scratch.iterdir())
