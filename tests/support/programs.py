"""Small Python programs run as processes of their own."""

import asyncio
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


async def run_program(program: str, *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `python -c program arguments`, run at the repository's root."""
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()
