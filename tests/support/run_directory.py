"""The directory of a run of tests, for what all its tests share."""

import atexit
from functools import cache
from pathlib import Path

from gateway.processes.shared_directory import SharedDirectory


@cache
def run_directory() -> Path:
    """The same for all tests of a process. It is removed when that ends or, if it is killed, by the next run."""
    directory = SharedDirectory("deepmesh-tests-")
    atexit.register(directory.remove)
    return directory.path
