"""Starts processes that the kernel kills when this one dies."""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mesh.processes import tether


def tethered(command: Sequence[str]) -> list[str]:
    """`command`, wrapped so that the kernel kills it when this process dies. Start it from the main thread: for the
    kernel, the parent is the thread that forked.
    """
    return [sys.executable, "-I", "-S", str(Path(tether.__file__)), str(os.getpid()), *command]


async def start_tethered(command: Sequence[str], **options: Any) -> asyncio.subprocess.Process:
    """Start `command`, tethered and without input. options: of asyncio.create_subprocess_exec."""
    return await asyncio.create_subprocess_exec(*tethered(command), stdin=asyncio.subprocess.DEVNULL, **options)
