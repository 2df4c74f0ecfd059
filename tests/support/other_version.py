"""The files of the version from which an upgrade starts."""

import io
import os
import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def extract_other_version(directory: Path) -> Path:
    """Extract the commit that AGAINST names, by default the last release, to a folder in `directory`."""
    commit = os.environ.get("AGAINST") or _git("describe", "--tags", "--abbrev=0").decode().strip()
    # File modes are as in a checkout, so that building an image of the same files uses the same layers.
    with tarfile.open(fileobj=io.BytesIO(_git("-c", "tar.umask=0022", "archive", commit))) as archive:
        archive.extractall(directory / "theirs", filter="data")
    return directory / "theirs"


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, f"name the other version: AGAINST=COMMIT ({done.stderr.decode().strip()})"
    return done.stdout
