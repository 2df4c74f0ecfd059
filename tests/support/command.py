"""The `deepmesh` command, run in this process: to import all that it needs takes a process most of a second."""

import asyncio
import io
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from unittest.mock import patch

from cli.commands import run


def run_here(
    arguments: Sequence[str], stdin: str = "", environment: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `deepmesh arguments`. Commands that start a mesh need the main thread."""
    status = 0
    with ExitStack() as stack:
        stack.enter_context(patch("sys.argv", ["deepmesh", *arguments]))
        stack.enter_context(patch("sys.stdin", io.StringIO(stdin)))
        stack.enter_context(patch.dict(os.environ, {"COLUMNS": "200", **(environment or {})}))
        out = stack.enter_context(redirect_stdout(io.StringIO()))
        err = stack.enter_context(redirect_stderr(io.StringIO()))
        try:
            run()
        except SystemExit as ended:
            status = int(ended.code or 0)
    return status, out.getvalue(), err.getvalue()


async def deepmesh(*arguments: str, stdin: str = "", **environment: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command, run in a thread of this process."""
    return await asyncio.to_thread(run_here, arguments, stdin, environment)
