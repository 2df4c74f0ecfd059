"""A small file system that can be full. Needs root."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def why_no_disk() -> str | None:
    """Why this machine cannot have one; None if it can."""
    return None if os.geteuid() == 0 else "a file system of its own needs root"


class SmallDisk:
    """Made by `small_disk`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """Fill the disk, so that there is no room for another byte."""
        with (self.path / "filler").open("wb", buffering=0) as file:
            for size in (1 << 20, os.sysconf("SC_PAGE_SIZE")):
                with suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass
        # The last pages of other files still have room: fill them too.
        for path in (each for each in self.path.iterdir() if each.name != "filler"):
            _fill_last_page(path)

    def free(self) -> None:
        (self.path / "filler").unlink(missing_ok=True)


def _fill_last_page(path: Path) -> None:
    with path.open("ab", buffering=0) as file, suppress(OSError):
        file.write(b"\n" * (-path.stat().st_size % os.sysconf("SC_PAGE_SIZE")))


@contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """Mount a small disk at `path` until the block ends."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "deepmesh-test", str(path)], check=True)
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
