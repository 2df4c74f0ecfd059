"""`python -m gateway`, as a process of its own."""

import asyncio
import sys
from pathlib import Path

from tests.support.addresses import NOWHERE

ROOT = Path(__file__).parents[2]


async def spawn(*settings: str) -> asyncio.subprocess.Process:
    """A gateway, without a scheduler unless `settings` name one."""
    arguments = [part for setting in (f"scheduler={NOWHERE}", *settings) for part in ("--set", setting)]
    return await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "gateway", *arguments], cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )
