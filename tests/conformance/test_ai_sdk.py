"""Vercel's AI SDK with tools and schemas, over each of the APIs: `make check-ai-sdk`, which needs node and npm."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "ai_sdk"
INSTALL = ("npm", "install", "--no-audit", "--no-fund", "--no-package-lock")
pytestmark = pytest.mark.check("ai-sdk")


def test_every_check_of_the_sdk_passes(mesh_url: str, tmp_path: Path) -> None:
    for name in ("package.json", "check.mjs"):
        shutil.copy(HERE / name, tmp_path)
    subprocess.run(INSTALL, cwd=tmp_path, check=True, capture_output=True)
    done = subprocess.run(("node", "check.mjs", mesh_url), cwd=tmp_path, check=True, capture_output=True, text=True)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == 24
    assert [each for each in results if each["failure"] is not None] == []
