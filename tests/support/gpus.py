"""Whether this machine has a GPU, found without a library that would settle on devices when it is loaded."""

from pathlib import Path


def has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))
