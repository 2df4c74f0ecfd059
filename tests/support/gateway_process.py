"""`python -m gateway`, as a process of its own."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.addresses import NOWHERE
from tests.support.forking import run_forked

ROOT = Path(__file__).parents[2]


async def spawn(*settings: str) -> asyncio.subprocess.Process:
    """A gateway, without a scheduler unless `settings` name one."""
    return await asyncio.create_subprocess_exec(
        sys.executable, *_arguments(settings), cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )


async def run_to_its_end(*settings: str) -> tuple[int, list[str]]:
    """Exit status of a gateway that cannot start, and the lines that it wrote to stderr."""
    status, _, err = await asyncio.wait_for(run_forked(*_arguments(settings)), 60)
    return status, err.strip().splitlines()


def _arguments(settings: Sequence[str]) -> list[str]:
    return ["-m", "gateway", *(part for each in (f"scheduler={NOWHERE}", *settings) for part in ("--set", each))]
