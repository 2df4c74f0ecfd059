"""The directory of a gateway's processes goes with them, however they end."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.processes.shared_directory import LOCK, SharedDirectory, remove_abandoned

PREFIX = "deepmesh-tested-"
# Forks a process that holds the directory, says where it is, and waits to be killed.
KEEPER = f"""
import os, sys, time
from gateway.processes.shared_directory import SharedDirectory
directory = SharedDirectory("{PREFIX}")
forked = os.fork()
if forked:
    print(directory.path, forked, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def test_a_killed_keepers_files_are_removed_later() -> None:
    keeper = subprocess.Popen([sys.executable, "-c", KEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert keeper.stdin is not None and keeper.stdout is not None
    path, forked = keeper.stdout.readline().split()
    keeper.kill()
    keeper.wait()
    remove_abandoned(PREFIX)
    assert (Path(path) / LOCK).exists()
    # The process that is left holds it until its standard input ends.
    descriptor = os.pidfd_open(int(forked))
    keeper.stdin.close()
    ended, _, _ = select.select([descriptor], [], [], 30)
    os.close(descriptor)
    assert ended
    remove_abandoned(PREFIX)
    assert not Path(path).exists()
    keeper.stdout.close()


def test_a_directory_that_may_be_used_is_kept(temporary: Path) -> None:
    mine = SharedDirectory(PREFIX)
    (temporary / f"{PREFIX}before").mkdir()
    (temporary / f"{PREFIX}link").symlink_to(temporary)
    other = SharedDirectory(PREFIX)
    assert sorted(each.name for each in temporary.iterdir()) == sorted(
        [mine.path.name, other.path.name, f"{PREFIX}before", f"{PREFIX}link"]
    )
    mine.remove()
    other.remove()
    assert not mine.path.exists() and not other.path.exists()
